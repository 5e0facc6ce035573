"""The endless order in which samples come: a pure function of the seed, whatever has been read before.

Of several sources each is shuffled by itself, epoch by epoch, and their turns are spread evenly: after p samples source
1 of weight w_1 has had floor(p w_1 / W), of the p' that are left source 2 has had floor(p' w_2 / (W - w_1)), and so on.
Where weights are the sources' sizes, each sample comes exactly once in every epoch of the whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.data.draws import permutation
from mmjax.errors import DataError


@dataclass(frozen=True)
class _Era:
    """Chapters between two losses."""

    first_chapter: int
    weights: tuple[int, ...]
    """0 for a source that is lost."""
    taken: tuple[int, ...]
    """How many samples of each source came before."""


class SampleOrder:
    """Chapter c holds the samples of positions [c, c + 1) x (chapter length) of the order; epochs hold whole chapters.

    A chapter is what rows are packed from at one time.
    """

    def __init__(
        self, samples: Sequence[np.ndarray], weights: Sequence[int] | None, seed: int, *, chapter_samples: int
    ):
        """`samples[source]` are the numbers of its usable samples; `weights` default to how many they are."""
        self._samples, self._seed = samples, seed
        counts = [len(numbers) for numbers in samples]
        self.epoch_samples = sum(counts)
        self.chapters_per_epoch = max(1, math.ceil(self.epoch_samples / chapter_samples))
        self._chapter_samples = math.ceil(self.epoch_samples / self.chapters_per_epoch)
        given = [weight if count else 0 for weight, count in zip(weights or counts, counts, strict=True)]
        divisor = math.gcd(*given) or 1
        self._eras = [_Era(0, tuple(weight // divisor for weight in given), (0,) * len(counts))]
        self._shuffled: dict[tuple[int, int], np.ndarray] = {}

    def exclude(self, source: int, first_chapter: int) -> None:
        """From this chapter on, which nobody has asked for yet, leave a source out; the others keep their proportions.

        Raises:
          DataError: no other source is left.
        """
        last = self._eras[-1]
        first_chapter = max(first_chapter, last.first_chapter)
        weights = tuple(0 if number == source else weight for number, weight in enumerate(last.weights))
        if not any(weights):
            raise DataError(
                "data.source", found="no source left", expected="at least one", remedy="bring a source's files back"
            )
        length = self._start(first_chapter) - self._start(last.first_chapter)
        taken = tuple(before + more for before, more in zip(last.taken, _shares(length, last.weights), strict=True))
        era = _Era(first_chapter, weights, taken)
        self._eras = [*(era for era in self._eras if era.first_chapter < first_chapter), era]

    def _start(self, chapter: int) -> int:
        epoch, number = divmod(chapter, self.chapters_per_epoch)
        return epoch * self.epoch_samples + min(number * self._chapter_samples, self.epoch_samples)

    def chapter(self, chapter: int) -> np.ndarray:
        """int64: the numbers of the samples of a chapter, in order."""
        era = next(era for era in reversed(self._eras) if era.first_chapter <= chapter)
        begun = self._start(era.first_chapter)
        positions = np.arange(self._start(chapter) - begun, self._start(chapter + 1) - begun)
        result = np.zeros(len(positions), np.int64)
        # What is left to the sources that have not had their turn: (place in the chapter, position among the rest).
        places, rest, total = np.arange(len(positions)), positions, sum(era.weights)
        for source, weight in enumerate(era.weights):
            if not weight:
                continue
            before = rest * weight // total
            is_taken = (rest + 1) * weight // total > before
            result[places[is_taken]] = self._take(source, era.taken[source] + before[is_taken])
            places, rest = places[~is_taken], (rest - before)[~is_taken]
            total -= weight
        return result

    def _take(self, source: int, indices: np.ndarray) -> np.ndarray:
        """Samples number `indices` (rising) of a source's own endless order."""
        epochs, within = np.divmod(indices, len(self._samples[source]))
        result = np.zeros(len(indices), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            result[here] = self._samples[source][self._order(source, epoch)[within[here]]]
        return result

    def _order(self, source: int, epoch: int) -> np.ndarray:
        if (source, epoch) not in self._shuffled:
            for kept in [kept for kept in self._shuffled if kept[0] == source][:-1]:
                del self._shuffled[kept]
            purpose = "epoch" if source == 0 else f"epoch of source {source}"
            self._shuffled[source, epoch] = permutation(len(self._samples[source]), purpose, self._seed, epoch)
        return self._shuffled[source, epoch]


def _shares(length: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `length` samples are of each source."""
    shares, rest, total = [], length, sum(weights)
    for weight in weights:
        shares.append(rest * weight // total if weight else 0)
        rest -= shares[-1]
        total -= weight
    return shares
