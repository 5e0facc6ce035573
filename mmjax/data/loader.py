"""Batches by step number. `Loader.batch(step)` is a pure function: a resumed run reads nothing again."""

import dataclasses
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from mmjax.config import AudioConfig, DataConfig, ModelConfig, VisionConfig
from mmjax.data.align import Sizes, read_patches, read_spectrograms
from mmjax.data.batch import Batch
from mmjax.data.cost import predicted_costs, quota_report, row_room
from mmjax.data.evaluation import EvaluationSet
from mmjax.data.files import LostFileError
from mmjax.data.index_cache import IndexCache
from mmjax.data.measure import PIPELINE_VERSION, Aligner, Measured, check_budget
from mmjax.data.microbatch import BufferPool, balanced_order, cost_balance
from mmjax.data.order import SampleOrder
from mmjax.data.packing import CHAPTER_WINDOWS, MIN_CHAPTER_SAMPLES, PackedDocument, RowPlan, fill
from mmjax.data.quarantine import LostSourceEvent, Quarantine, RejectedRecord
from mmjax.data.sources.mixture import LostSource, patiently
from mmjax.data.sources.open_source import Split, open_sources
from mmjax.data.tokenizer import open_tokenizer
from mmjax.errors import DataError, writing

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
    "balance_rows",
    "patch_buckets",
    "newline_token",
    "video_frames_per_feature",
    "row_clips",
    "sounds",
)
HEARING_SETTINGS = ("clip_frames", "mel_bins", "values_per_feature")
TOWER_SETTINGS = ("kind", "patch_pixels", "channels", "frames_per_patch", "table_rows", "table_columns")
INDEX_FOLDER = "data_index"
# Another start of the run would find the old sizes in its index.
_OTHER_FILES = "put the file back as it was, or give another --run-dir: this one remembers what was measured"
SOURCES = "sources.json"
BALANCE_PARTS = 8
"""For how many devices the balance of costs is reported, where they divide the rows."""


class Loader:
    """All samples of a split, measured (text and image headers) when it is first made for a run.

    Raises DataError for the first sample that cannot be used; with `bad_sample="skip"` such samples are left out,
    counted and quarantined, as `too_long` says of long ones; and it is an error when none is left.
    """

    def __init__(
        self,
        data: DataConfig,
        vision: VisionConfig,
        seed: int,
        split: Split = "train",
        *,
        model: ModelConfig | None = None,
        folder: Path | None = None,
        num_hosts: int = 1,
        host: int = 0,
        say: Callable[[str], None] = print,
    ):
        """`model` predicts costs and says how sounds are heard; `folder`, that of the run, keeps the index, the
        quarantine and lost sources.
        """
        if split == "held_out" and data.too_long != "error":
            # A question without its picture or its answer asks something else.
            data = dataclasses.replace(data, too_long="drop")
        self._data, self._vision, self._model, self._seed, self._split = data, vision, model, seed, split
        self._num_hosts, self._say = num_hosts, say
        self.tokenizer = open_tokenizer(data)
        self._audio = model.audio if model is not None else AudioConfig()
        self._aligner = Aligner(data, vision, self.tokenizer, self._audio)
        self._lock = threading.Lock()
        cache = IndexCache(folder / INDEX_FOLDER if folder is not None else None, is_writer=host == 0)
        self._quarantine = Quarantine(folder if split == "train" else None, is_writer=host == 0)
        known = folder / INDEX_FOLDER / f"{split}_{SOURCES}" if folder is not None else None
        self._mixture = open_sources(data, seed, split, cache, _read_known(known), say)
        self._measured = [self._measure(number, cache) for number in range(len(self._mixture.sources))]
        self._check_usable()
        self._prepare_plan()
        cache.flush()
        if known is not None and host == 0 and data.source != "digits":
            _write_known(known, self._mixture.names, self._mixture.digests, [len(s) for s in self._mixture.sources])

    def _measure(self, number: int, cache: IndexCache) -> Measured:
        source, name = self._mixture.sources[number], self._mixture.names[number]
        count = len(source) if self._split == "train" else min(len(source), self._data.eval_samples)
        bad = {
            record.index
            for record in self._quarantine.rejected
            if record.source_digest == source.digest and record.stage == "record"
        }

        def measure() -> dict[str, np.ndarray]:
            return self._aligner.measure(source, count, bad).to_arrays()

        key = self._aligner.key(source, count)
        measured = Measured.from_arrays(measure() if name == "digits" else cache.get(key, measure))
        for index, where, reason in measured.rejected:
            record = {"source": name, "source_digest": source.digest, "index": index, "where": where, "reason": reason}
            self._quarantine.reject(RejectedRecord(stage="record", **record))
        return measured

    def _check_usable(self) -> None:
        """Some sample must be left; then the totals over all sources."""
        totals = {name: sum(m.outcomes[name] for m in self._measured) for name in self._measured[0].outcomes}
        self.num_skipped, self.num_dropped = totals["bad"], totals["dropped"]
        self.num_cut, self.num_without_pictures = totals["cut"], totals["without pictures"]
        if not any(len(measured.usable) for measured in self._measured):
            rejected = next((m.rejected[0] for m in self._measured if m.rejected), None)
            raise DataError(
                f"{self._split} samples",
                found=f"none that can be used: {self.num_skipped} skipped, {self.num_dropped} dropped",
                expected="at least one",
                remedy=f"the first error was: {rejected[1]}: found {rejected[2]}"
                if rejected
                else "raise row_tokens and row_patches",
            )

    def _prepare_plan(self) -> None:
        data, mixture = self._data, self._mixture
        self._sizes = np.zeros((len(mixture), len(Sizes._fields)), np.int64)
        samples = []
        for number, measured in enumerate(self._measured):
            numbers = mixture.numbers(number)
            self._sizes[numbers.start : numbers.start + len(measured.sizes)] = measured.sizes
            samples.append(measured.usable + numbers.start)
        self._samples = np.concatenate(samples)
        self._costs = predicted_costs(self._sizes, self._model)
        chapter_samples = max(MIN_CHAPTER_SAMPLES, CHAPTER_WINDOWS * data.packing_window)
        order = SampleOrder(samples, mixture.weights, self._seed, chapter_samples=chapter_samples)
        room = row_room(data, self._vision, self._model)
        self._plan = RowPlan(
            order,
            self._sizes,
            self._costs,
            room=room,
            window=data.packing_window,
            balance_rows=data.balance_rows,
            seed=self._seed,
        )
        self._unreadable = {
            mixture.numbers(mixture.names.index(record.source))[record.index]
            for record in self._quarantine.rejected
            if record.stage == "picture" and mixture.digests.get(record.source) == record.source_digest
        }
        self._lost_from_step: dict[int, int] = {}
        for event in self._quarantine.lost:
            if event.source in mixture.names:
                source = mixture.names.index(event.source)
                self._lost_from_step[source] = event.from_step
                self._plan.exclude(source, event.from_chapter)

    def batch(self, step: int, *, rows: Collection[int] | None = None, pool: BufferPool | None = None) -> Batch:
        """The batch of a step, counted from 0. The same on every call, in any order, in any process.

        Of the rows not in `rows`, which may be all, nothing is read, and they stay empty. Arrays are taken from `pool`.

        Raises DataError where a picture cannot be decoded; with `bad_sample="skip"` its sample's room stays empty.
        """
        planned = self.planned_rows(step)
        wanted = range(len(planned)) if rows is None else rows
        packed = [self.read_row(row, step) if number in wanted else [] for number, row in enumerate(planned)]
        if rows is None and not any(packed):
            raise _nothing_readable(f"step {step}")
        return fill(
            packed,
            self._data,
            self._vision,
            self.tokenizer.pad_token_id,
            audio=self._audio,
            row_patches=self.patch_bucket(planned),
            **({"allocate": pool.full} if pool else {}),
        )

    def read_row(self, samples: list[int], step: int) -> list[PackedDocument]:
        """The samples of a planned row of a step, less those that cannot be read."""
        return [document for sample in samples if (document := self._read(sample, step)) is not None]

    def sample_cost(self, number: int) -> int:
        """Predicted cost of a sample, in 1 / `cost.UNIT` of that of one token."""
        return int(self._costs[number])

    @property
    def num_left_out(self) -> int:
        """Samples that are bad, as far as is known, or too long."""
        return self.num_skipped + len(self._unreadable) + self.num_dropped

    @property
    def rejected(self) -> list[RejectedRecord]:
        """Records that are left out because they are bad."""
        return list(self._quarantine.rejected)

    def planned_rows(self, step: int, plan: RowPlan | None = None) -> list[list[int]]:
        """Numbers of the samples in each row of a step, by the loader's own plan if no other is given."""
        first = step * self._data.rows
        rows = [(plan or self._plan).row(first + row) for row in range(self._data.rows)]
        return [rows[row] for row in balanced_order([int(self._costs[row].sum()) for row in rows])]

    def patch_bucket(self, planned: list[list[int]]) -> int:
        """Patch room of the rows of a batch: row_patches halved while all rows fit, `patch_buckets` sizes in all."""
        needed = max((int(self._sizes[row, 1].sum()) for row in planned), default=0)
        sizes = patch_sizes(self._data)
        return min(size for size in sizes if size >= needed)

    def row_costs(self, step: int, plan: RowPlan | None = None) -> list[int]:
        """Predicted costs of the rows of a step, in the unit of `cost.UNIT`."""
        return [int(self._costs[row].sum()) for row in self.planned_rows(step, plan)]

    def _read(self, number: int, step: int) -> PackedDocument | None:
        source, index = self._mixture.locate(number)
        if number in self._unreadable or self._lost_from_step.get(source, sys.maxsize) <= step:
            return None
        waiting = self._data.lost_source_wait_seconds if self._data.lost_source == "wait" else 0
        try:
            packed = patiently(lambda: self._open(source, index), waiting, self._say)
        except LostFileError:
            self._lose(source, step)
            return None
        except DataError as error:
            if self._data.bad_sample == "error":
                raise
            self._reject(number, error)
            return None
        if packed.document.sizes != tuple(self._sizes[number]):
            raise DataError(
                packed.document.where,
                found="a picture or sound of another size than when it was measured",
                expected="files that stay as they are",
                remedy=_OTHER_FILES,
            )
        return packed

    def _open(self, source: int, index: int) -> PackedDocument:
        document, _ = self._aligner.document(self._mixture.sources[source], index)
        if document is None:
            raise DataError(
                f"{self._mixture.names[source]}, sample {index}",
                found="a sample that no longer fits a row",
                expected="files that stay as they are",
                remedy=_OTHER_FILES,
            )
        patches = read_patches(document, self._data, self._vision)
        return PackedDocument(document, patches, read_spectrograms(document, self._data, self._audio))

    def _reject(self, number: int, error: DataError) -> None:
        source, index = self._mixture.locate(number)
        name, digest = self._mixture.names[source], self._mixture.sources[source].digest
        reason = f"{error.found}; expected {error.expected}"
        record = {"source": name, "source_digest": digest, "index": index, "where": error.where, "reason": reason}
        with self._lock:
            self._unreadable.add(number)
            self._quarantine.reject(RejectedRecord(stage="picture", **record))
            check_budget(self.num_skipped + len(self._unreadable), len(self._mixture), self._data, str(error))

    def _lose(self, source: int, step: int) -> None:
        """Go on without a source whose file is gone, or raise the error being handled."""
        with self._lock:
            if source in self._lost_from_step:
                self._lost_from_step[source] = min(step, self._lost_from_step[source])
                return
            # Hosts that lose it at different moments would go on with different batches: all of them start again.
            if self._data.lost_source != "reweight" or self._num_hosts > 1 or len(self._mixture.sources) == 1:
                raise
            chapter = self._plan.exclude(source)
            name = self._mixture.names[source]
            self._lost_from_step[source] = step
            self._quarantine.lose(LostSourceEvent(source=name, from_step=step, from_chapter=chapter))
            self._say(f"lost the source {name} at step {step}: its samples are left out, the others go on")

    def iterate(
        self, start_step: int, *, rows: Collection[int] | None = None, pool: BufferPool | None = None
    ) -> Iterator[Batch]:
        """Batches of start_step, start_step + 1, ... without end, `data.prefetch_batches` of them made ahead."""
        ahead = self._data.prefetch_batches
        options = grain.ReadOptions(num_threads=min(ahead, 4), prefetch_buffer_size=ahead)
        steps = grain.MapDataset.range(start_step, sys.maxsize)
        return iter(steps.map(lambda step: self.batch(step, rows=rows, pool=pool)).to_iter_dataset(options))

    def evaluation(self) -> EvaluationSet:
        """The samples in source order, as questions."""
        readable = [int(number) for number in self._samples if self._read(int(number), 0) is not None]
        if not readable:
            raise _nothing_readable("evaluation")
        samples = [self._mixture[number] for number in readable]
        return EvaluationSet(samples, self._aligner)

    def position(self, step: int) -> dict[str, int]:
        """Where the plan stands before a step, to be kept with its checkpoint: a resume packs nothing before it."""
        chapter, first_row = self._plan.place(step * self._data.rows)
        return {"chapter": chapter, "first_row": first_row}

    def resume(self, position: dict[str, int]) -> None:
        """Take up the `position` of a run of the same fingerprint."""
        self._plan.begin_at(position["chapter"], position["first_row"])

    def counters(self) -> dict[str, float]:
        """Samples used, left out and why, and how well the rows of the first chapter and step are packed."""
        # A resumed run stands far behind it, and must not pack all that lies between.
        plan = self._plan.beginning()
        rows = plan.chapter(0)
        tokens, patches = (np.array([self._sizes[row, column].sum() for row in rows]) for column in (0, 1))
        quotas = quota_report(tokens, patches, self._data, self._vision, self._model)
        counters = {
            "samples": len(self._samples),
            "skipped": self.num_skipped + len(self._unreadable),
            "dropped": self.num_dropped,
            "cut": self.num_cut,
            "without_pictures": self.num_without_pictures,
            "supervised_tokens": int(self._sizes[:, 2].sum()),
            "fill_rate": float(tokens.sum()) / (len(rows) * self._data.row_tokens),
            "image_memory_share": quotas.image_memory,
            "image_rows_share": quotas.image_rows,
            "quota_breaches": quotas.num_breaches,
        }
        parts = BALANCE_PARTS if self._data.rows % BALANCE_PARTS == 0 else self._data.rows
        return counters | {"cost_max_over_mean": cost_balance(self.row_costs(0, plan), parts)}

    def fingerprint(self) -> dict[str, Any]:
        """All that the order and content of batches depend on, as JSON values, to be kept beside a checkpoint."""
        digests = list(self._mixture.digests.values())
        names = ["source_digest"] if len(digests) == 1 else [f"source_{n}_digest" for n in range(1, len(digests) + 1)]
        arrays = (self._samples, self._sizes, self._costs)
        return {
            "pipeline_version": PIPELINE_VERSION,
            "seed": self._seed,
            "split": self._split,
            **dict(zip(names, digests, strict=True)),
            "source_weights": self._mixture.weights,
            "num_samples": len(self._samples),
            "num_skipped": self.num_skipped,
            "num_dropped": self.num_dropped,
            "tokenizer_digest": self._aligner.digest,
            **{name: getattr(self._data, name) for name in ORDER_SETTINGS},
            "quotas": dataclasses.asdict(self._data.quotas),
            "video": dataclasses.asdict(self._data.video),
            **{name: getattr(self._vision, name) for name in TOWER_SETTINGS},
            **{name: list(getattr(self._vision, name)) for name in ("tilings", "pixel_mean", "pixel_deviation")},
            # Absent where it is as it was before there was a choice.
            **({} if self._vision.transparency == "white" else {"transparency": self._vision.transparency}),
            **{f"audio_{name}": getattr(self._audio, name) for name in HEARING_SETTINGS if self._audio.is_present},
            **(self._signal_rule() if self._audio.is_present and self._audio.hears == "signals" else {}),
            # Last: where only the model or a picture's size changed, this is what tells.
            "sizes_and_costs_digest": hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest(),
        }

    def _signal_rule(self) -> dict[str, Any]:
        return {"signal": dataclasses.asdict(self._data.signal), "signal_scale": self._data.signal_scale}


def patch_sizes(data: DataConfig) -> list[int]:
    """The patch rooms that batches may have, largest first: at most `data.patch_buckets`, multiples of 4."""
    sizes = (-(-data.row_patches // (4 << halvings)) * 4 for halvings in range(data.patch_buckets))
    return list(dict.fromkeys(max(size, min(4, data.row_patches)) for size in sizes))


def _nothing_readable(where: str) -> DataError:
    return DataError(
        where,
        found="no readable sample",
        expected="at least one",
        remedy="set data.bad_sample=error to see what is wrong with them",
    )


def _read_known(path: Path | None) -> dict[str, LostSource]:
    """The sources of earlier starts of a run, by name."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
    except (OSError, ValueError):
        entries = []
    return {name: LostSource(name, digest, count) for name, digest, count in entries}


def _write_known(path: Path, names: list[str], digests: dict[str, str], counts: list[int]) -> None:
    unfinished = path.with_suffix(".tmp")
    entries = [(name, digests[name], count) for name, count in zip(names, counts, strict=True)]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(entries), encoding="utf-8")
        unfinished.replace(path)


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises DataError, naming the field, where a resumed run would see other batches than the interrupted one."""
    for name in saved | current:
        if saved.get(name) != current.get(name):
            to_restore = "version of mmjax that began" if name == "pipeline_version" else "data and settings of"
            raise DataError(
                f"data of the checkpoint, {name}",
                found=f"{current.get(name)!r}",
                expected=f"{saved.get(name)!r}, as when the run was saved",
                remedy=f"restore the {to_restore} the run, or start a new run_dir",
            )
