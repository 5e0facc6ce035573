"""Which samples share a row, for every row of every epoch, and the arrays of a batch of rows.

The rows of all epochs form one endless sequence; step k takes rows [k B, (k+1) B) of it. The order of samples is cut
into chapters, each packed by itself into rows that are then shuffled. So a row depends on the seed and its number,
each sample stands in each epoch exactly once, and no picture or sound is ever cut.

A row takes the oldest of the next `packing_window` samples, then, while any fits, the one that

    maximises  fill * share of the row it fills  -  | cost of the row with it - density * tokens of the row with it |

where density is the chapter's cost per token and fill the cost of a full row; the share weighs positions, patches and
clips of sound by how scarce they are in the chapter. So rows become full, and as dear as their tokens say on average.

Rows of nearly equal cost stand together: `balance_rows` of them, so that devices with one row each wait little.
"""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, DataConfig, VisionConfig
from mmjax.data.align import Document
from mmjax.data.audio import SILENCE
from mmjax.data.batch import Batch
from mmjax.data.draws import permutation
from mmjax.data.order import SampleOrder
from mmjax.data.picture_layout import NEWLINE, ORDINARY


class PackedDocument(NamedTuple):
    """A document with its media read."""

    document: Document
    patches: np.ndarray
    """[patches, values] of its pictures."""
    spectrograms: np.ndarray | None = None
    """[clips, frames, bins] of its sounds; None if it has none."""


Allocate = Callable[[tuple[int, ...], type, float], np.ndarray]
"""`(shape, dtype, value)` -> an array full of the value."""

# Chapters are at least this long: the last rows of a chapter stay short of samples that fit.
MIN_CHAPTER_SAMPLES = 4096
CHAPTER_WINDOWS = 4
KEPT_CHAPTERS = 3
# Weight of filling a row against balancing its cost.
FILL_WEIGHT = 1.0


def first_fit(sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...]) -> list[list[int]]:
    """Put things of several sizes, each of which fits an empty row, into the first row with room for all of them."""
    rows: list[list[int]] = []
    room: list[np.ndarray] = []
    for number, size in enumerate(np.asarray(sizes, np.int64).reshape(-1, len(capacity))):
        place = next((row for row, left in enumerate(room) if np.all(size <= left)), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(np.array(capacity, np.int64))
        rows[place].append(number)
        room[place] -= size
    return rows


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one row holds."""

    tokens: int
    patches: int
    image_patches: int
    """Patches that several samples of a row may have together; one sample alone may have all `patches`."""
    image_rows: float = 1.0
    """Share of the rows that may hold pictures."""
    clips: int = 0
    """Clips of sound."""


def pack(
    tokens: np.ndarray,
    patches: np.ndarray,
    costs: np.ndarray,
    clips: np.ndarray | None = None,
    *,
    room: Room,
    window: int,
) -> list[list[int]]:
    """Rows of samples, each sample in one row; all arrays are [n], in the order of the samples. No `clips`: no sounds.

    A row takes only from the `window` samples that are next when it is begun. Where no more than `room.image_rows` of
    the rows may hold pictures, the others take samples without pictures while there are any.
    """
    total = max(1, int(tokens.sum()))
    density = float(costs.sum()) / total
    clips = np.zeros_like(tokens) if clips is None else clips
    scarcity = np.array(
        [total / room.tokens, patches.sum() / max(1, room.image_patches), clips.sum() / max(1, room.clips)]
    )
    shares = tokens * (scarcity[0] / room.tokens) + patches * (scarcity[1] / max(1, room.image_patches))
    shares = shares + clips * (scarcity[2] / max(1, room.clips))
    gains = FILL_WEIGHT * density * room.tokens / scarcity.sum() * shares
    waiting = np.arange(min(window, len(tokens)))
    following = len(waiting)
    rows: list[list[int]] = []
    while len(waiting):
        has_images = int((len(rows) + 1) * room.image_rows) > int(len(rows) * room.image_rows)
        row, waiting = _pack_row(waiting, (tokens, patches, clips, costs, gains), density, room, has_images)
        rows.append(row)
        more = np.arange(following, min(len(tokens), following + len(row)))
        following += len(more)
        waiting = np.concatenate([waiting, more])
    return rows


def _pack_row(
    waiting: np.ndarray, arrays: tuple[np.ndarray, ...], density: float, room: Room, has_images: bool
) -> tuple[list[int], np.ndarray]:
    """One row from the samples `waiting`, and those that are left.

    `arrays` are tokens, patches, clips, costs and gains of all samples.
    """
    tokens, patches, clips, costs, gains = (array[waiting] for array in arrays)
    is_free = np.ones(len(waiting), bool)
    if not has_images and np.any(patches == 0):
        is_free &= patches == 0
    place = int(np.argmax(is_free))
    row: list[int] = []
    used_tokens = used_patches = used_clips = 0
    cost = 0.0
    while True:
        row.append(int(waiting[place]))
        is_free[place] = False
        used_tokens += int(tokens[place])
        used_patches += int(patches[place])
        used_clips += int(clips[place])
        cost += float(costs[place])
        fits = is_free & (tokens <= room.tokens - used_tokens) & (patches <= max(0, room.image_patches - used_patches))
        fits &= clips <= room.clips - used_clips
        if not fits.any():
            break
        imbalance = np.abs(cost + costs - density * (used_tokens + tokens))
        place = int(np.argmax(np.where(fits, gains - imbalance, -np.inf)))
    is_left = ~np.isin(waiting, row)
    return row, waiting[is_left]


def arrange(costs: np.ndarray, first_row: int, group_rows: int, shuffle: Callable[[int], np.ndarray]) -> list[int]:
    """An order of rows, `first_row` of them before: groups of nearly equal cost, the groups shuffled.

    Groups begin at multiples of `group_rows`; of those that the ends cut, rows of middling cost take the place.
    """
    if group_rows == 1:
        return shuffle(len(costs)).tolist()
    by_cost = np.argsort(costs, kind="stable")
    head = min(-first_row % group_rows, len(costs))
    tail = (len(costs) - head) % group_rows
    middle = (len(costs) - head - tail) // 2
    ends = by_cost[middle : middle + head + tail]
    groups = np.delete(by_cost, np.s_[middle : middle + head + tail]).reshape(-1, group_rows)
    ordered = [ends[:head], *groups[shuffle(len(groups))], ends[head:]]
    return np.concatenate(ordered).tolist() if len(costs) else []


class RowPlan:
    """The endless sequence of rows. A chapter is packed when first asked for; the last ones are kept."""

    def __init__(
        self,
        order: SampleOrder,
        sizes: np.ndarray,
        costs: np.ndarray,
        *,
        room: Room,
        window: int,
        balance_rows: int,
        seed: int,
    ):
        """`sizes` [n, 5] (see `align.Sizes`) and `costs` [n] are those of sample numbers."""
        self._order, self._sizes, self._costs = order, sizes, costs
        self._room, self._window, self._balance_rows, self._seed = room, window, balance_rows, seed
        # First rows of the chapters known so far, one after the other.
        self._first_chapter, self._starts = 0, [0]
        self._chapters: OrderedDict[int, list[list[int]]] = OrderedDict()
        self._lock = threading.RLock()
        self._last_packed = -1
        self.num_packed = 0
        """Chapters packed so far."""

    def beginning(self) -> "RowPlan":
        """The same plan at its first row: what is asked of it moves nothing here."""
        return RowPlan(
            self._order,
            self._sizes,
            self._costs,
            room=self._room,
            window=self._window,
            balance_rows=self._balance_rows,
            seed=self._seed,
        )

    def row(self, number: int) -> list[int]:
        """Numbers of the samples in row `number`, counted over all epochs."""
        with self._lock:
            chapter, start = self.place(number)
            return self.chapter(chapter)[number - start]

    def place(self, row: int) -> tuple[int, int]:
        """The chapter that a row is in, and the chapter's first row."""
        with self._lock:
            if row < self._starts[0]:
                self.begin_at(0, 0)
            while self._starts[-1] <= row:
                self._next_start()
            index = bisect.bisect_right(self._starts, row) - 1
            return self._first_chapter + index, self._starts[index]

    def chapter(self, number: int) -> list[list[int]]:
        """All rows of a chapter."""
        with self._lock:
            if number < self._first_chapter:
                self.begin_at(0, 0)
            while self._first_chapter + len(self._starts) <= number:
                self._next_start()
            return self._rows(number, self._starts[number - self._first_chapter])

    def begin_at(self, chapter: int, first_row: int) -> None:
        """Take it as known that a chapter begins with this row, so that those before need not be packed."""
        with self._lock:
            self._first_chapter, self._starts = chapter, [first_row]
            self._chapters.clear()

    def exclude(self, source: int, first_chapter: int | None = None) -> int:
        """Leave a source out from a chapter on; if not given, from the first one that nobody has asked for.

        Returns that chapter. Raises DataError where no other source is left.
        """
        with self._lock:
            first_chapter = self._last_packed + 1 if first_chapter is None else first_chapter
            self._order.exclude(source, first_chapter)
            return first_chapter

    def _next_start(self) -> None:
        last = self._first_chapter + len(self._starts) - 1
        self._starts.append(self._starts[-1] + len(self._rows(last, self._starts[-1])))

    def _rows(self, number: int, first_row: int) -> list[list[int]]:
        if number not in self._chapters:
            while len(self._chapters) >= KEPT_CHAPTERS:
                self._chapters.popitem(last=False)
            samples = self._order.chapter(number)
            tokens, patches, clips = (self._sizes[samples, column] for column in (0, 1, 4))
            costs = self._costs[samples]
            rows = pack(tokens, patches, costs, clips, room=self._room, window=self._window)
            arranged = arrange(
                np.array([costs[row].sum() for row in rows]),
                first_row,
                self._balance_rows,
                lambda count: permutation(count, "rows", self._seed, number),
            )
            self._chapters[number] = [samples[rows[row]].tolist() for row in arranged]
            self._last_packed = max(self._last_packed, number)
            self.num_packed += 1
        return self._chapters[number]


def _full(shape: tuple[int, ...], dtype: type, value: float) -> np.ndarray:
    return np.full(shape, value, dtype)


def fill(
    rows: Sequence[Sequence[PackedDocument]],
    data: DataConfig,
    vision: VisionConfig,
    pad_token_id: int,
    *,
    audio: AudioConfig | None = None,
    row_patches: int | None = None,
    allocate: Allocate = _full,
) -> Batch:
    """The batch of these rows (at most `data.rows`; the rest is padding), each of documents that fit it.

    `row_patches` is the patch room of a row, `data.row_patches` if not given; there is room for sounds if `audio` is
    that of a model with a tower for them.
    """
    num_rows, num_tokens = data.rows, data.row_tokens
    num_patches = (data.row_patches if row_patches is None else row_patches) if vision.is_present else 0
    positions, patches = (num_rows, num_tokens), (num_rows, num_patches)
    spectrograms = (0, 0, 0)
    if audio is not None and audio.is_present:
        spectrograms = (data.row_clips, audio.clip_frames, audio.mel_bins)
    batch = Batch(
        tokens=allocate(positions, np.int32, pad_token_id),
        targets=allocate(positions, np.int32, pad_token_id),
        loss_weight=allocate(positions, np.float32, 0),
        segment_ids=allocate(positions, np.int32, 0),
        positions=allocate(positions, np.int32, 0),
        feature_index=allocate(positions, np.int32, -1),
        patches=allocate((*patches, vision.patch_values), np.float32, 0),
        patch_segment_ids=allocate(patches, np.int32, 0),
        patch_position=allocate((*patches, 3), np.int32, 0),
        patch_grid=allocate((*patches, 3), np.int32, 1),
        patch_feature=allocate((num_rows, num_patches // 4), np.int32, -1),
        spectrograms=allocate((num_rows, *spectrograms), np.float32, SILENCE),
        sound_index=allocate(positions, np.int32, -1),
    )
    clip_features = audio.clip_features if audio is not None else 0
    for number, row in enumerate(rows):
        _fill_row(Batch(*(array[number] for array in batch)), row, vision.patches_per_feature, clip_features)
    return batch


def _fill_row(row: Batch, documents: Sequence[PackedDocument], patches_per_feature: int, clip_features: int) -> None:
    token = patch = image = clip = 0
    for segment, (document, patches, spectrograms) in enumerate(documents, 1):
        length = len(document.tokens)
        here = slice(token, token + length)
        row.tokens[here] = document.tokens
        row.targets[token : token + length - 1] = document.tokens[1:]
        # A position learns the token after it: the last one of a document has none.
        row.loss_weight[token : token + length - 1] = document.is_supervised[1:]
        row.segment_ids[here] = segment
        row.positions[here] = np.arange(length)
        row.patches[patch : patch + document.num_patches] = patches
        features = [np.zeros(0, np.int32)]
        for placed in document.pictures:
            layout, there = placed.layout, slice(patch, patch + placed.num_patches)
            first = patch // patches_per_feature
            # The learned newline is the feature behind those of all patches.
            index = np.where(layout.feature == NEWLINE, len(row.patches), layout.feature + first)
            features.append(np.where(layout.feature == ORDINARY, -1, index))
            if patches_per_feature == 4:
                # All frames of a clip go to the same features.
                num_windows = layout.num_patches // 4
                row.patch_feature[first : first + num_windows] = np.tile(index, num_windows // len(index))
            row.patch_segment_ids[there] = image + layout.segment
            row.patch_position[there] = layout.position
            row.patch_grid[there] = layout.grid
            image += layout.segment.max()
            patch += placed.num_patches
        row.feature_index[here][document.is_feature] = np.concatenate(features)
        if spectrograms is not None and document.sounds:
            row.spectrograms[clip : clip + len(spectrograms)] = spectrograms
            heard = [np.zeros(0, np.int32)]
            for placed in document.sounds:
                heard.append(clip * clip_features + np.arange(placed.num_features, dtype=np.int32))
                clip += placed.num_clips
            row.sound_index[here][document.is_sound] = np.concatenate(heard)
        token += length
