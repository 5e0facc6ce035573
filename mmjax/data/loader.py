"""Batches by step number. `Loader.batch(step)` is a pure function: a resumed run reads nothing again."""

import hashlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from mmjax.config import DataConfig, VisionConfig
from mmjax.data.align import Document, align, read_patches
from mmjax.data.batch import Batch
from mmjax.data.evaluation import EvaluationBatch, evaluation_batches
from mmjax.data.packing import PackedDocument, RowPlan, fill
from mmjax.data.sources.open_source import Split, open_source
from mmjax.data.tokenizer import open_tokenizer
from mmjax.errors import DataError

# Rises when the same settings and files begin to give other batches.
PIPELINE_VERSION = 1
ORDER_SETTINGS = (
    "rows",
    "row_tokens",
    "row_patches",
    "image_max_patches",
    "image_max_pixels",
    "images",
    "too_long",
    "bad_sample",
    "packing_window",
)


class Loader:
    """All samples of a split, measured once (text and image headers) when it is made.

    Raises DataError for the first sample that cannot be used; with `bad_sample="skip"` and `too_long="drop"` such
    samples are left out and counted, and it is an error when none is left.
    """

    def __init__(self, data: DataConfig, vision: VisionConfig, seed: int, split: Split = "train"):
        self._data, self._vision, self._seed, self._split = data, vision, seed, split
        self.tokenizer = open_tokenizer(data)
        self._source = open_source(data, seed, split)
        self._lock = threading.Lock()
        self._unreadable: set[int] = set()
        self.num_skipped = 0
        """Records that could not be read when the loader was made."""
        self.num_dropped = 0
        """Samples longer than a row."""
        self._measure()
        self._plan = RowPlan(self._samples, self._sizes[self._samples, :2], data, seed)

    def _measure(self) -> None:
        count = len(self._source) if self._split == "train" else min(len(self._source), self._data.eval_samples)
        samples, sizes = [], np.zeros((count, 3), np.int64)
        first_error = None
        for number in range(count):
            try:
                document = self._align(number)
            except DataError as error:
                if self._data.bad_sample == "error":
                    raise
                first_error = first_error or error
                self.num_skipped += 1
                continue
            if self._fits(document):
                samples.append(number)
                sizes[number] = document.sizes
            else:
                self.num_dropped += 1
        if not samples:
            raise DataError(
                f"{self._split} samples",
                found=f"none that can be used: {self.num_skipped} skipped, {self.num_dropped} dropped",
                expected="at least one",
                remedy=f"the first error was: {first_error}" if first_error else "raise row_tokens and row_patches",
            )
        self._samples, self._sizes = np.array(samples), sizes

    def _align(self, number: int) -> Document:
        return align(self._source[number], self.tokenizer, self._data, self._vision)

    def _fits(self, document: Document) -> bool:
        tokens, patches, _ = document.sizes
        if tokens <= self._data.row_tokens and patches <= self._data.row_patches:
            return True
        if self._data.too_long == "error":
            raise DataError(
                document.where,
                found=f"a sample of {tokens} tokens and {patches} patches",
                expected=f"at most {self._data.row_tokens} tokens and {self._data.row_patches} patches, one row",
                remedy="raise data.row_tokens or row_patches, lower data.image_max_patches, or set data.too_long=drop",
            )
        return False

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0. The same on every call, in any order, in any process.

        Raises DataError where a picture cannot be decoded; with `bad_sample="skip"` its sample's room stays empty.
        """
        first = step * self._data.rows
        planned = [self._plan.row(first + row) for row in range(self._data.rows)]
        rows = [[packed for number in row if (packed := self._read(number)) is not None] for row in planned]
        if not any(rows):
            raise _nothing_readable(f"step {step}")
        return fill(rows, self._data, self._vision, self.tokenizer.pad_token_id)

    def _read(self, number: int) -> PackedDocument | None:
        try:
            document = self._align(number)
            patches = read_patches(document, self._data, self._vision)
        except DataError:
            if self._data.bad_sample == "error":
                raise
            with self._lock:
                self._unreadable.add(number)
            return None
        if document.sizes != tuple(self._sizes[number]):
            raise DataError(
                document.where,
                found="a picture of another size than when the run started",
                expected="files that stay as they are",
                remedy="start the run again",
            )
        return document, patches

    def iterate(self, start_step: int) -> Iterator[Batch]:
        """Batches of start_step, start_step + 1, ... without end, `data.prefetch_batches` of them made ahead."""
        ahead = self._data.prefetch_batches
        options = grain.ReadOptions(num_threads=min(ahead, 4), prefetch_buffer_size=ahead)
        return iter(grain.MapDataset.range(start_step, sys.maxsize).map(self.batch).to_iter_dataset(options))

    def evaluation(self) -> list[EvaluationBatch]:
        """The samples in source order, in rows that leave room for answers."""
        samples = [self._source[int(number)] for number in self._samples if self._read(int(number)) is not None]
        if not samples:
            raise _nothing_readable("evaluation")
        return evaluation_batches(samples, self.tokenizer, self._data, self._vision)

    def counters(self) -> dict[str, float]:
        """Samples used, left out and why, and what the first epoch amounts to."""
        rows = len(self._plan.epoch(0))
        return {
            "samples": len(self._samples),
            "skipped": self.num_skipped + len(self._unreadable),
            "dropped": self.num_dropped,
            "supervised_tokens": int(self._sizes[:, 2].sum()),
            "rows": rows,
            "fill_rate": float(self._sizes[:, 0].sum()) / (rows * self._data.row_tokens),
        }

    def fingerprint(self) -> dict[str, Any]:
        """All that the order and content of batches depend on, as JSON values, to be kept beside a checkpoint."""
        return {
            "pipeline_version": PIPELINE_VERSION,
            "seed": self._seed,
            "split": self._split,
            "source_digest": self._source.digest,
            "num_samples": len(self._samples),
            "num_skipped": self.num_skipped,
            "num_dropped": self.num_dropped,
            "sizes_digest": hashlib.sha256(self._samples.tobytes() + self._sizes.tobytes()).hexdigest(),
            "tokenizer_digest": self.tokenizer.digest,
            **{name: getattr(self._data, name) for name in ORDER_SETTINGS},
            "patch_pixels": self._vision.patch_pixels,
            "channels": self._vision.channels,
        }


def _nothing_readable(where: str) -> DataError:
    return DataError(
        where,
        found="no readable sample",
        expected="at least one",
        remedy="set data.bad_sample=error to see what is wrong with them",
    )


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises DataError, naming the field, where a resumed run would see other batches than the interrupted one."""
    for name in saved | current:
        if saved.get(name) != current.get(name):
            raise DataError(
                f"data of the checkpoint, {name}",
                found=f"{current.get(name)!r}",
                expected=f"{saved.get(name)!r}, as when the run was saved",
                remedy="restore the data and settings of the run, or start a new run_dir",
            )
