"""Which samples share a row, for every row of every epoch, and the arrays of a batch of rows.

The rows of all epochs form one endless sequence; step k takes rows [k B, (k+1) B) of it. An epoch is a shuffle of the
whole source, cut into windows of `packing_window` samples; each window is packed by first fit into rows of its own. So
a row depends on the seed and its number, each sample stands in each epoch exactly once, and no picture is ever cut.
"""

import bisect
import threading
from collections.abc import Sequence

import numpy as np

from mmjax.config import DataConfig, VisionConfig
from mmjax.data.align import Document
from mmjax.data.batch import Batch
from mmjax.data.draws import permutation
from mmjax.data.images import patch_positions

PackedDocument = tuple[Document, np.ndarray]
"""A document and its patches."""


def first_fit(sizes: Sequence[tuple[int, int]], capacity: tuple[int, int]) -> list[list[int]]:
    """Put things of (positions, patches), each of which fits an empty row, into the first row with room for both."""
    rows: list[list[int]] = []
    room: list[list[int]] = []
    for number, (tokens, patches) in enumerate(sizes):
        place = next((row for row, left in enumerate(room) if tokens <= left[0] and patches <= left[1]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(list(capacity))
        rows[place].append(number)
        room[place][0] -= tokens
        room[place][1] -= patches
    return rows


class RowPlan:
    """The endless sequence of rows. An epoch is laid out when first asked for; the last two are kept."""

    def __init__(self, samples: np.ndarray, sizes: np.ndarray, data: DataConfig, seed: int):
        """`samples` [n] are the source's numbers, `sizes` [n, 2] their positions and patches."""
        self._samples, self._sizes, self._seed = samples, sizes, seed
        self._capacity = (data.row_tokens, data.row_patches)
        self._window = data.packing_window
        self._starts = [0]
        self._epochs: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()

    def row(self, number: int) -> list[int]:
        """Numbers of the samples in row `number`, counted over all epochs."""
        with self._lock:
            while self._starts[-1] <= number:
                self._starts.append(self._starts[-1] + len(self._rows(len(self._starts) - 1)))
            epoch = bisect.bisect_right(self._starts, number) - 1
            return self._rows(epoch)[number - self._starts[epoch]]

    def epoch(self, number: int) -> list[list[int]]:
        """All rows of an epoch."""
        with self._lock:
            return self._rows(number)

    def _rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                self._epochs.pop(min(self._epochs))
            order = permutation(len(self._samples), "epoch", self._seed, epoch)
            rows = []
            for start in range(0, len(order), self._window):
                window = order[start : start + self._window]
                samples = self._samples[window].tolist()
                packed = first_fit(self._sizes[window].tolist(), self._capacity)
                rows += [[samples[place] for place in row] for row in packed]
            self._epochs[epoch] = rows
        return self._epochs[epoch]


def fill(rows: Sequence[Sequence[PackedDocument]], data: DataConfig, vision: VisionConfig, pad_token_id: int) -> Batch:
    """The batch of these rows (at most `data.rows`; the rest is padding), each of documents that fit it."""
    num_rows, num_tokens = data.rows, data.row_tokens
    num_patches = data.row_patches if vision.is_present else 0
    positions, patches = (num_rows, num_tokens), (num_rows, num_patches)
    batch = Batch(
        tokens=np.full(positions, pad_token_id, np.int32),
        targets=np.full(positions, pad_token_id, np.int32),
        loss_weight=np.zeros(positions, np.float32),
        segment_ids=np.zeros(positions, np.int32),
        positions=np.zeros(positions, np.int32),
        feature_index=np.full(positions, -1, np.int32),
        patches=np.zeros((*patches, vision.channels * vision.patch_pixels**2), np.float32),
        patch_segment_ids=np.zeros(patches, np.int32),
        patch_position=np.zeros((*patches, 3), np.int32),
        patch_grid=np.ones((*patches, 3), np.int32),
        patch_feature=np.full((num_rows, num_patches // 4), -1, np.int32),
    )
    for number, row in enumerate(rows):
        _fill_row(Batch(*(array[number] for array in batch)), row)
    return batch


def _fill_row(row: Batch, documents: Sequence[PackedDocument]) -> None:
    token = patch = image = 0
    for segment, (document, patches) in enumerate(documents, 1):
        length = len(document.tokens)
        here = slice(token, token + length)
        row.tokens[here] = document.tokens
        row.targets[token : token + length - 1] = document.tokens[1:]
        # A position learns the token after it: the last one of a document has none.
        row.loss_weight[token : token + length - 1] = document.is_supervised[1:]
        row.segment_ids[here] = segment
        row.positions[here] = np.arange(length)
        features = patch // 4 + np.arange(document.num_patches // 4)
        row.feature_index[here][document.is_feature] = features
        row.patch_feature[features] = features
        row.patches[patch : patch + document.num_patches] = patches
        token += length
        for placed in document.pictures:
            image += 1
            there = slice(patch, patch + placed.num_patches)
            row.patch_segment_ids[there] = image
            row.patch_position[there] = patch_positions(*placed.grid)
            row.patch_grid[there] = (1, *placed.grid)
            patch += placed.num_patches
