from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.monitor.dashboard import RIGHT, WRONG, AnsweredQuestion, pick, write_sheet


def _answers(count: int, num_right: int) -> list[AnsweredQuestion]:
    picture = np.full((16, 16, 3), 200, np.uint8)
    return [
        AnsweredQuestion(
            question="What is $1 + 1$ in this picture of digits, if one may ask at some length?",
            reference=str(number),
            given=str(number) if number < num_right else "an answer\nof several lines",
            kind=f"kind {number % 3}",
            picture=picture if number % 2 else None,
        )
        for number in range(count)
    ]


def _has_color(path: Path, color: str) -> bool:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return bool(np.any(np.all(pixels == np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]), axis=1)))


def test_the_sheet_is_a_picture_of_right_and_wrong_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.png"
    write_sheet(path, "run", _answers(40, 3), [(1, 2.0), (2, None), (3, 1.0)], [(3, 0.5)], {"all": 0.2, "kind 0": 0.3})
    with Image.open(path) as image:
        assert image.size == (1800, 1050)
    assert _has_color(path, RIGHT) and _has_color(path, WRONG)
    assert [file.name for file in tmp_path.iterdir()] == ["answers.png"]


def test_the_sheet_shows_each_kind_whether_right_or_wrong() -> None:
    picked = pick(_answers(40, 0), 6)
    assert [answer.kind for answer in picked] == ["kind 0", "kind 1", "kind 2"] * 2
