"""The sheet of a run as a PNG: pictures, questions, right and given answers; the loss; the score by question kind."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

ROWS, COLUMNS = 4, 6
RIGHT, WRONG, MUTED, INK = "#1a8f4c", "#cf3a32", "#9aa3ad", "#22272e"
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 18.0, 10.5, 100
_QUESTION_COLUMNS, _ANSWER_COLUMNS = 26, 15


@dataclass(frozen=True)
class AnsweredQuestion:
    """One card of the sheet."""

    question: str
    reference: str
    given: str
    kind: str
    picture: np.ndarray | None
    """[height, width] or [height, width, 3], uint8 or floats of 0 to 1; None for a question without one."""

    @property
    def is_right(self) -> bool:
        return self.given == self.reference


def write_sheet(
    path: Path,
    title: str,
    answers: Sequence[AnsweredQuestion],
    losses: Sequence[tuple[int, float | None]],
    scores: Sequence[tuple[int, float]],
    baseline: Mapping[str, float],
) -> None:
    """Write the sheet: cards of some `answers`, curves of (step, loss) and (step, exact match), bars by kind.

    `baseline` is the score of the majority guess by kind of question, and under "all".
    """
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, facecolor="white")
    figure.text(0.02, 0.965, title, fontsize=17, weight="bold", color=INK, va="center")
    num_right = sum(answer.is_right for answer in answers)
    subtitle = f"{num_right} of {len(answers)} held-out answers right"
    figure.text(0.02, 0.933, subtitle, fontsize=12, color=INK, va="center")
    cards = figure.add_gridspec(ROWS, COLUMNS, left=0.02, right=0.655, top=0.905, bottom=0.025, hspace=0.08, wspace=0.1)
    for index, answer in enumerate(pick(answers, ROWS * COLUMNS)):
        _draw_card(figure.add_subplot(cards[divmod(index, COLUMNS)]), answer)
    charts = figure.add_gridspec(2, 1, left=0.72, right=0.96, top=0.905, bottom=0.06, hspace=0.3)
    _draw_curves(figure.add_subplot(charts[0]), losses, scores)
    _draw_kinds(figure.add_subplot(charts[1]), answers, baseline)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png")
    temporary.rename(path)


def pick(answers: Sequence[AnsweredQuestion], count: int) -> list[AnsweredQuestion]:
    """The first answers of each kind in turn, whether right or wrong."""
    by_kind: dict[str, list[AnsweredQuestion]] = {}
    for answer in answers:
        by_kind.setdefault(answer.kind, []).append(answer)
    turns = max((len(group) for group in by_kind.values()), default=0)
    in_turn = [group[turn] for turn in range(turns) for group in by_kind.values() if turn < len(group)]
    return in_turn[:count]


def _draw_card(axes: Axes, answer: AnsweredQuestion) -> None:
    color = RIGHT if answer.is_right else WRONG
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(color=color, linewidth=2.5)
    picture = axes.inset_axes((0.06, 0.44, 0.88, 0.52))
    picture.axis("off")
    if answer.picture is not None:
        top = 255 if answer.picture.dtype == np.uint8 else 1.0
        picture.imshow(answer.picture, cmap="gray", vmin=0, vmax=top, interpolation="nearest", aspect=_aspect(answer))
    lines = textwrap.wrap(answer.question, _QUESTION_COLUMNS, max_lines=3, placeholder=" …")
    axes.text(
        0.5, 0.42, "\n".join(lines), ha="center", va="top", fontsize=8.5, color=INK, linespacing=1.1, parse_math=False
    )
    axes.add_patch(Rectangle((0, 0), 1, 0.2, color=color, alpha=0.14, linewidth=0))
    given = textwrap.shorten(repr(answer.given)[1:-1], _ANSWER_COLUMNS, placeholder="…") or "(nothing)"
    reference = textwrap.shorten(answer.reference, _ANSWER_COLUMNS, placeholder="…")
    axes.text(0.05, 0.15, f"right {reference}", va="center", fontsize=9, color=INK, parse_math=False)
    axes.text(0.05, 0.055, f"given {given}", va="center", fontsize=9, color=color, weight="bold", parse_math=False)


def _aspect(answer: AnsweredQuestion) -> Literal["equal", "auto"]:
    """Long, thin pictures, as spectrograms are, fill their place."""
    assert answer.picture is not None
    height, width = answer.picture.shape[:2]
    return "equal" if 1 / 4 < width / height < 4 else "auto"


def _draw_curves(axes: Axes, losses: Sequence[tuple[int, float | None]], scores: Sequence[tuple[int, float]]) -> None:
    steps = [step for step, loss in losses if loss is not None]
    values = [loss for _, loss in losses if loss is not None]
    axes.plot(steps, values, color="#3b6ea8", linewidth=1.4)
    axes.set_title("training loss, and held-out exact match", loc="left", fontsize=12, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color="#3b6ea8")
    axes.set_ylim(bottom=0)
    axes.spines["top"].set_visible(False)
    score_axes = axes.twinx()
    score_axes.plot([step for step, _ in scores], [score for _, score in scores], "o-", color=RIGHT, linewidth=1.8)
    score_axes.set_ylim(0, 1)
    score_axes.set_ylabel("exact match", color=RIGHT)
    score_axes.spines["top"].set_visible(False)


def _draw_kinds(axes: Axes, answers: Sequence[AnsweredQuestion], baseline: Mapping[str, float]) -> None:
    groups = {kind: [answer for answer in answers if answer.kind == kind] for kind in sorted({a.kind for a in answers})}
    groups["all"] = list(answers)
    scores = [sum(answer.is_right for answer in group) / max(1, len(group)) for group in groups.values()]
    places = np.arange(len(groups))
    axes.barh(places - 0.2, scores, height=0.38, color=RIGHT, label="exact match")
    axes.barh(
        places + 0.2, [baseline.get(kind, 0) for kind in groups], height=0.38, color=MUTED, label="majority guess"
    )
    for place, score in zip(places, scores, strict=True):
        axes.text(score + 0.01, place - 0.2, f"{score:.2f}", va="center", fontsize=9, color=INK)
    axes.set_yticks(places, [f"{kind} ({len(group)})" for kind, group in groups.items()])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_title("exact match by kind of question", loc="left", fontsize=12, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.06), ncols=2, fontsize=9, frameon=False)
