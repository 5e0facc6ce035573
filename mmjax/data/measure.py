"""What each sample of a source needs, found out by reading all of them once."""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.config import AudioConfig, DataConfig, VisionConfig
from mmjax.data.align import Document, Outcome, Sizes, align, fit
from mmjax.data.index_cache import Arrays, array_text, text_array
from mmjax.data.prompts import trained_form
from mmjax.data.sources.conversation import Sample, Source
from mmjax.data.tokenizer import Tokenizer
from mmjax.errors import DataError

# Rises when the same settings and files begin to give other batches.
PIPELINE_VERSION = 5
# Settings that decide whether a sample can be used, and what it needs.
SAMPLE_SETTINGS = (
    "media_root",
    "row_tokens",
    "row_patches",
    "image_max_patches",
    "image_max_pixels",
    "too_long",
    "bad_sample",
    "newline_token",
    "video",
    "video_frames_per_feature",
    "video_max_frames",
    "video_max_seconds",
    "row_clips",
    "sound_max_seconds",
    "signal",
    "signal_max_steps",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All samples of one source."""

    usable: np.ndarray
    """[n] int64: the samples that can be used."""
    sizes: np.ndarray
    """[count, 5] int64: `align.Sizes` of each sample; zeros for those left out."""
    outcomes: dict[str, int]
    """How many samples were bad, cut, and so on."""
    rejected: list[tuple[int, str, str]]
    """(number, where, reason) of each bad record."""

    def to_arrays(self) -> Arrays:
        """For the index cache."""
        text = json.dumps([self.outcomes, self.rejected])
        return {"usable": self.usable, "sizes": self.sizes, "text": text_array(text)}

    @staticmethod
    def from_arrays(arrays: Arrays) -> "Measured":
        """The reverse."""
        outcomes, rejected = json.loads(array_text(arrays["text"]))
        return Measured(
            usable=arrays["usable"],
            sizes=arrays["sizes"],
            outcomes=outcomes,
            rejected=[(index, where, reason) for index, where, reason in rejected],
        )


class Aligner:
    """Samples of a source as documents that fit a row; the same settings for measuring and for reading."""

    def __init__(self, data: DataConfig, vision: VisionConfig, tokenizer: Tokenizer, audio: AudioConfig):
        self.data, self.vision, self.tokenizer, self.audio = data, vision, tokenizer, audio
        self._form = trained_form(data, vision)
        self.digest = tokenizer.digest + (f" {self._form.digest}" if self._form else "")
        """Of all that turns text into tokens."""

    def align(self, sample: Sample) -> Document:
        """The sample as a document, by the chat template if there is one.

        Raises:
          DataError: the sample cannot be written so.
        """
        if self._form is None:
            return align(sample, self.tokenizer, self.data, self.vision, self.audio)
        document = self._form.conversation(sample)
        # A picture inside an answer is not its end.
        goes_on = np.append(document.is_supervised[1:] | document.is_feature[1:], False)
        ends = document.tokens[document.is_supervised & ~goes_on]
        if np.any(ends != self.tokenizer.end_token_id):
            token = int(ends[ends != self.tokenizer.end_token_id][0])
            raise DataError(
                sample.where,
                found=f"an answer that the chat template ends with token {token}",
                expected=f"token {self.tokenizer.end_token_id}, data.end_token, where generation stops",
                remedy="set data.end_token to the token that ends answers",
            )
        return document

    def document(self, source: Source, index: int) -> tuple[Document | None, Outcome]:
        """Raises DataError where the sample cannot be used."""
        return fit(self.align(source[index]), self.data)

    def key(self, source: Source, count: int) -> str:
        """Names all that `measure` depends on."""
        settings: dict[str, Any] = {name: getattr(self.data, name) for name in SAMPLE_SETTINGS}
        towers = f"{dataclasses.asdict(self.vision)} {dataclasses.asdict(self.audio)}"
        return f"measured {PIPELINE_VERSION} {source.digest} {count} {settings} {towers} {self.digest}"

    def measure(self, source: Source, count: int, quarantined: Collection[int]) -> Measured:
        """The first `count` samples; those quarantined before stay out.

        Raises:
          DataError: a sample cannot be used, and `data.bad_sample` or `data.too_long` is `error`; or more are bad than
            `data.max_bad_samples` and `data.max_bad_share` allow.
        """
        usable: list[int] = []
        sizes = np.zeros((count, len(Sizes._fields)), np.int64)
        outcomes = {"bad": 0, "cut": 0, "without pictures": 0, "dropped": 0}
        rejected: list[tuple[int, str, str]] = []
        for index in range(count):
            try:
                if index in quarantined:
                    outcomes["bad"] += 1
                    continue
                document, outcome = self.document(source, index)
            except DataError as error:
                if self.data.bad_sample == "error":
                    raise
                outcomes["bad"] += 1
                rejected.append((index, error.where, f"{error.found}; expected {error.expected}"))
                check_budget(outcomes["bad"], count, self.data, str(error))
                continue
            if outcome != "whole":
                outcomes[outcome] += 1
            if document is not None:
                usable.append(index)
                sizes[index] = document.sizes
        return Measured(usable=np.array(usable, np.int64), sizes=sizes, outcomes=outcomes, rejected=rejected)


def check_budget(num_bad: int, count: int, data: DataConfig, latest: str) -> None:
    """Raises DataError where too many of `count` records are bad to go on without them."""
    allowed = max(data.max_bad_samples, int(data.max_bad_share * count))
    if num_bad > allowed:
        raise DataError(
            "bad records",
            found=f"{num_bad:,} of {count:,}",
            expected=f"at most {allowed:,} (data.max_bad_samples, data.max_bad_share)",
            remedy=f"see the run's quarantine.jsonl, then mend the records or allow more; the latest: {latest}",
        )
