"""Held-out questions in rows that leave room to write the answers anew, and what guessing would score."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mmjax.config import AudioConfig, DataConfig, VisionConfig
from mmjax.data.align import Document, read_patches, read_pixels, read_spectrograms
from mmjax.data.batch import Batch
from mmjax.data.measure import Aligner
from mmjax.data.packing import PackedDocument, fill, first_fit
from mmjax.data.sources.conversation import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationAnswer:
    """One answer to be written anew: positions [start, start + budget) of the row, each predicted one before."""

    number: int
    """Of its question in the set, in the order of the source."""
    row: int
    start: int
    budget: int
    """Positions reserved for it, end token included: what the longest answer of the set needs, if the row has it."""
    question: str
    reference: str
    kind: str
    picture: np.ndarray | None
    """uint8 [height, width, channels]: the first picture as the model sees it, before any blanking; without one,
    the first clip of sound, drawn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationBatch:
    """Rows that hold answers as in training; with the references they also give a loss.

    The positions after a reference, up to its budget, hold pad tokens, belong to its document and are not supervised.
    """

    batch: Batch
    answers: list[EvaluationAnswer]


class EvaluationSet:
    """All held-out questions of a source, their pictures and sounds read once.

    The last answer of each sample is the one that is asked for; what follows it is left out.
    """

    def __init__(self, samples: Iterable[Sample], aligner: Aligner):
        tokenizer, data, vision, audio = aligner.tokenizer, aligner.data, aligner.vision, aligner.audio
        self._data, self._vision, self._audio, self._pad = data, vision, audio, tokenizer.pad_token_id
        questions = [_without_what_follows(sample) for sample in samples]
        documents = [aligner.align(sample) for sample in questions]
        budget = max((len(document.tokens) - document.answer_start for document in documents), default=0)
        self._documents, self._asked = [], []
        for number, (sample, document) in enumerate(zip(questions, documents, strict=True)):
            room = min(budget, data.row_tokens - document.answer_start)
            packed = _read(_with_room(document, room, self._pad), data, vision, audio)
            self._documents.append(packed)
            self._asked.append(
                EvaluationAnswer(
                    number=number,
                    row=0,
                    start=document.answer_start,
                    budget=room,
                    question=next((turn.text for turn in sample.messages[::-1] if turn.role == "user"), ""),
                    # As it is written, in whatever a chat template puts around it, and as the tokenizer gives it back.
                    reference=tokenizer.decode(_answer(document, tokenizer.end_token_id)).strip(),
                    kind=sample.kind,
                    picture=_first_picture(packed, data, vision),
                )
            )

    def references(self) -> dict[int, np.ndarray]:
        """By the number of its question, the tokens of each reference answer with the room behind it, [budget]."""
        return {
            asked.number: packed.document.tokens[asked.start :]
            for asked, packed in zip(self._asked, self._documents, strict=True)
        }

    def batches(self, answers: Mapping[int, np.ndarray] | None = None) -> list[EvaluationBatch]:
        """All questions with their references; or those that `answers` has, with its tokens in their place."""
        numbers = range(len(self._documents)) if answers is None else sorted(answers)
        chosen = [self._documents[n] if answers is None else self._answered(n, answers[n]) for n in numbers]
        documents = [packed.document for packed in chosen]
        sizes = [(len(document.tokens), document.num_patches, document.num_clips) for document in documents]
        rows = first_fit(sizes, (self._data.row_tokens, self._data.row_patches, self._data.row_clips))
        batches = []
        for first in range(0, len(rows), self._data.rows):
            here, asked = rows[first : first + self._data.rows], []
            for row, places in enumerate(here):
                start = 0
                for place in places:
                    one = self._asked[numbers[place]]
                    asked.append(dataclasses.replace(one, row=row, start=start + one.start))
                    start += len(documents[place].tokens)
            packed = [[chosen[place] for place in places] for places in here]
            batch = fill(packed, self._data, self._vision, self._pad, audio=self._audio)
            batches.append(EvaluationBatch(batch=batch, answers=asked))
        return batches

    def _answered(self, number: int, answer: np.ndarray) -> PackedDocument:
        packed = self._documents[number]
        tokens = np.concatenate([packed.document.tokens[: self._asked[number].start], answer])
        return packed._replace(document=dataclasses.replace(packed.document, tokens=tokens))


def _read(document: Document, data: DataConfig, vision: VisionConfig, audio: AudioConfig | None) -> PackedDocument:
    spectrograms = None if audio is None else read_spectrograms(document, data, audio)
    return PackedDocument(document, read_patches(document, data, vision), spectrograms)


def _without_what_follows(sample: Sample) -> Sample:
    last = max(number for number, message in enumerate(sample.messages) if message.role == "assistant")
    return dataclasses.replace(sample, messages=sample.messages[: last + 1])


def _answer(document: Document, end_token_id: int) -> list[int]:
    """Tokens of the last answer, before the one that ends it."""
    tokens = document.tokens[document.answer_start :].tolist()
    return tokens[: tokens.index(end_token_id)] if end_token_id in tokens else tokens


def _with_room(document: Document, budget: int, pad_token_id: int) -> Document:
    missing = (0, document.answer_start + budget - len(document.tokens))
    return dataclasses.replace(
        document,
        tokens=np.pad(document.tokens, missing, constant_values=pad_token_id),
        is_supervised=np.pad(document.is_supervised, missing),
        is_feature=np.pad(document.is_feature, missing),
        is_sound=np.pad(document.is_sound, missing),
    )


def _first_picture(packed: PackedDocument, data: DataConfig, vision: VisionConfig) -> np.ndarray | None:
    if packed.document.pictures:
        return read_pixels(packed.document.pictures[0], data, vision)
    if packed.spectrograms is None or not len(packed.spectrograms):
        return None
    # Time from left to right, low frequencies at the bottom.
    clip = packed.spectrograms[0].T[::-1]
    lowest, highest = float(clip.min()), float(clip.max())
    return np.rint(255 * (clip - lowest) / max(highest - lowest, 1e-9)).astype(np.uint8)[:, :, None]


def majority_baseline(answers: Iterable[EvaluationAnswer]) -> dict[str, float]:
    """Per kind of question, the score of always giving its commonest answer; under "all", over all questions."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        by_kind[answer.kind][answer.reference] += 1
    hits = {kind: max(counts.values()) for kind, counts in by_kind.items()}
    scores = {kind: hits[kind] / counts.total() for kind, counts in sorted(by_kind.items())}
    total = sum(counts.total() for counts in by_kind.values())
    return scores | ({"all": sum(hits.values()) / total} if total else {})
