"""Scikit-learn's handwritten digits in 2x2 grids, with questions. The train and held-out digits are disjoint."""

import hashlib
from typing import Literal

import numpy as np
from sklearn.datasets import load_digits

from mmjax.data.draws import draw
from mmjax.data.sources.conversation import Message, Sample

EPOCH_SAMPLES = 32_768
"""Samples before the pictures repeat."""
# Every fifth digit is held out, whatever the seed.
HELD_OUT_EVERY = 5
KINDS = ("read", "largest", "smallest", "sum", "corner", "even")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
SIDE = 8


class Digits:
    """Sample i is a pure function of (seed, split, i): a 16x16 picture, a kind of question, its answer."""

    def __init__(self, seed: int, split: Literal["train", "held_out"]):
        pixels, labels = load_digits(return_X_y=True)
        is_held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
        self.digit_numbers = np.flatnonzero(is_held_out == (split == "held_out"))
        """Which of scikit-learn's digits this split draws from."""
        # The file holds 0 to 16.
        images = np.round(pixels[self.digit_numbers] * (255 / 16)).astype(np.uint8)
        self._labels = labels[self.digit_numbers]
        self.digest = hashlib.sha256(
            repr((seed, split, EPOCH_SAMPLES, KINDS, HELD_OUT_EVERY)).encode()
            + images.tobytes()
            + self._labels.astype(np.int64).tobytes()
        ).hexdigest()
        self._split = split
        self._grids = draw(4 * EPOCH_SAMPLES, f"{split} grid", seed).reshape(-1, 4) % len(self._labels)
        self._questions = draw(2 * EPOCH_SAMPLES, f"{split} question", seed).reshape(-1, 2)
        cells = images[self._grids].reshape(-1, 2, 2, SIDE, SIDE)
        self._pictures = cells.swapaxes(2, 3).reshape(-1, 2 * SIDE, 2 * SIDE)

    def __len__(self) -> int:
        return EPOCH_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        labels = self._labels[self._grids[index]].tolist()
        kind_draw, corner_draw = self._questions[index]
        kind = KINDS[int(kind_draw) % len(KINDS)]
        question, answer = _question(kind, labels, corner=int(corner_draw) % 4)
        return Sample(
            where=f"digits ({self._split}), sample {index}",
            kind=kind,
            messages=(
                Message(role="user", parts=(self._pictures[index], question), is_supervised=False),
                Message(role="assistant", parts=(answer,), is_supervised=True),
            ),
        )


def _question(kind: str, labels: list[int], *, corner: int) -> tuple[str, str]:
    match kind:
        case "read":
            return "read?", "".join(str(label) for label in labels)
        case "largest":
            return "largest?", str(max(labels))
        case "smallest":
            return "smallest?", str(min(labels))
        case "sum":
            return "sum?", str(sum(labels))
        case "corner":
            return f"{CORNERS[corner]}?", str(labels[corner])
        case "even":
            return "how many even?", str(sum(label % 2 == 0 for label in labels))
    raise AssertionError(kind)
