"""Several sources as one: what `data.source` names, opened, and its samples numbered one source after the other."""

import bisect
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mmjax.data.draws import permutation
from mmjax.data.files import LostFileError
from mmjax.data.sources.conversation import Sample, Source
from mmjax.errors import ConfigurationError

LARGEST_WEIGHT = 10**6
POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SourceName:
    """One entry of `data.source`: `PATH#N,WEIGHT`."""

    path: str
    num_samples: int | None
    """N; None takes all."""
    weight: Fraction | None

    @property
    def text(self) -> str:
        return self.path + (f"#{self.num_samples}" if self.num_samples is not None else "")


def parse_names(text: str, setting: str) -> list[SourceName]:
    """The entries of `data.source` or `data.eval_source`.

    Raises:
      ConfigurationError: a weight of 0, weights for some entries only, or an entry given twice.
    """
    names = []
    for entry in text.split(";"):
        match = re.fullmatch(r"(.*?)(?:#(\d{1,12}))?(?:,\s*(\d+(?:\.\d+)?))?", entry.strip(), re.DOTALL)
        assert match is not None
        path, count, weight = match.groups()
        names.append(
            SourceName(
                path=path,
                num_samples=int(count) if count is not None else None,
                weight=Fraction(weight) if weight is not None else None,
            )
        )
    weights = [name.weight for name in names if name.weight is not None]
    if weights and (len(weights) < len(names) or min(weights) <= 0 or 0 in [name.num_samples for name in names]):
        raise ConfigurationError(
            f"data.{setting}",
            found=repr(text),
            expected="a weight above 0 for each source, or for none",
            remedy="mend it",
        )
    if len({name.path for name in names}) < len(names):
        raise ConfigurationError(
            f"data.{setting}", found=repr(text), expected="each source once", remedy="give it a larger weight instead"
        )
    return names


def whole_weights(names: Sequence[SourceName]) -> list[int] | None:
    """The weights as whole numbers in the same proportion; None where there are none."""
    weights = [name.weight for name in names if name.weight is not None]
    if not weights:
        return None
    scale = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    if max(numbers) > LARGEST_WEIGHT:
        raise ConfigurationError(
            "data.source",
            found=f"weights in the proportion {' : '.join(str(number) for number in numbers)}",
            expected=f"whole numbers of at most {LARGEST_WEIGHT:,}",
            remedy="round the weights",
        )
    return numbers


class SubSample:
    """`count` samples of a source, drawn by the seed, in the order of the source."""

    def __init__(self, source: Source, name: SourceName, seed: int):
        count = name.num_samples
        assert count is not None
        if not 0 < count <= len(source):
            raise ConfigurationError(
                "data.source",
                found=f"{name.text} of a source with {len(source):,} samples",
                expected=f"a number from 1 to {len(source):,}",
                remedy="give fewer, or leave #N out",
            )
        self._source = source
        self._chosen = np.sort(permutation(len(source), "sub-sample", seed)[:count])
        self.digest = f"{source.digest}#{count}, seed {seed}"

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Sample:
        return self._source[int(self._chosen[index])]


@dataclass
class LostSource:
    """Stands for a source whose file is gone, with what is remembered of it."""

    path: str
    digest: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        raise LostFileError(
            self.path, found="no such file", expected="the file of the run's start", remedy="see data.lost_source"
        )


class Mixture:
    """The sources of a run. Sample `number` is that of the source whose turn of the numbers it falls in."""

    def __init__(self, names: Sequence[SourceName], sources: Sequence[Source]):
        self.names = [name.text for name in names]
        self.sources = list(sources)
        self.weights = whole_weights(names)
        self._starts = list(itertools.accumulate((len(source) for source in sources), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Sample:
        source, index = self.locate(number)
        return self.sources[source][index]

    def locate(self, number: int) -> tuple[int, int]:
        """(source, index in it) of a sample."""
        source = bisect.bisect_right(self._starts, number) - 1
        return source, number - self._starts[source]

    def numbers(self, source: int) -> range:
        """Numbers of all samples of a source."""
        return range(self._starts[source], self._starts[source + 1])

    @property
    def digests(self) -> dict[str, str]:
        """By the source's name."""
        return {name: source.digest for name, source in zip(self.names, self.sources, strict=True)}


def patiently(action: Callable, seconds: float, say: Callable[[str], None]):
    """What `action` returns, tried again while it raises LostFileError, for at most `seconds`."""
    limit = time.monotonic() + seconds
    is_told = False
    while True:
        try:
            return action()
        except LostFileError as error:
            if time.monotonic() >= limit:
                raise
            if not is_told:
                say(f"waiting for {error.where}: {error.found}")
                is_told = True
            time.sleep(min(POLL_SECONDS, max(0.0, limit - time.monotonic())))
