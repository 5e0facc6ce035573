"""Held-out questions in rows that leave room to write the answers anew, and what guessing would score."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable
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

    row: int
    start: int
    budget: int
    """Positions reserved for it, end token included: what the longest answer of the set needs, if the row has it."""
    question: str
    reference: str
    kind: str
    picture: np.ndarray | None
    """uint8 [height, width, channels]: the first picture as the model sees it, before any blanking."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationBatch:
    """Rows that hold the reference answers as in training, so that they also give a loss.

    The positions after a reference, up to its budget, hold pad tokens, belong to its document and are not supervised.
    """

    batch: Batch
    answers: list[EvaluationAnswer]


def evaluation_batches(samples: Iterable[Sample], aligner: Aligner) -> list[EvaluationBatch]:
    """The last answer of each sample is the one that is asked for; what follows it is left out."""
    tokenizer, data, vision, audio = aligner.tokenizer, aligner.data, aligner.vision, aligner.audio
    questions = [_without_what_follows(sample) for sample in samples]
    documents = [aligner.align(sample) for sample in questions]
    budget = max((len(document.tokens) - document.answer_start for document in documents), default=0)
    roomy = [
        _with_room(document, min(budget, data.row_tokens - document.answer_start), tokenizer.pad_token_id)
        for document in documents
    ]
    sizes = [(len(document.tokens), document.num_patches, document.num_clips) for document in roomy]
    rows = first_fit(sizes, (data.row_tokens, data.row_patches, data.row_clips))
    batches = []
    for first in range(0, len(rows), data.rows):
        chosen = rows[first : first + data.rows]
        answers = []
        for number, row in enumerate(chosen):
            start = 0
            for place in row:
                document, sample = roomy[place], questions[place]
                answers.append(
                    EvaluationAnswer(
                        row=number,
                        start=start + document.answer_start,
                        budget=len(document.tokens) - document.answer_start,
                        question=next((turn.text for turn in sample.messages[::-1] if turn.role == "user"), ""),
                        # As the tokenizer gives it back: it may lower case, say, what it takes.
                        reference=tokenizer.decode(tokenizer.encode(sample.messages[-1].text)).strip(),
                        kind=sample.kind,
                        picture=_first_picture(document, data, vision),
                    )
                )
                start += len(document.tokens)
        packed = [[_read(roomy[place], data, vision, audio) for place in row] for row in chosen]
        batch = fill(packed, data, vision, tokenizer.pad_token_id, audio=audio)
        batches.append(EvaluationBatch(batch=batch, answers=answers))
    return batches


def _read(document: Document, data: DataConfig, vision: VisionConfig, audio: AudioConfig | None) -> PackedDocument:
    spectrograms = None if audio is None else read_spectrograms(document, data, audio)
    return PackedDocument(document, read_patches(document, data, vision), spectrograms)


def _without_what_follows(sample: Sample) -> Sample:
    last = max(number for number, message in enumerate(sample.messages) if message.role == "assistant")
    return dataclasses.replace(sample, messages=sample.messages[: last + 1])


def _with_room(document: Document, budget: int, pad_token_id: int) -> Document:
    missing = (0, document.answer_start + budget - len(document.tokens))
    return dataclasses.replace(
        document,
        tokens=np.pad(document.tokens, missing, constant_values=pad_token_id),
        is_supervised=np.pad(document.is_supervised, missing),
        is_feature=np.pad(document.is_feature, missing),
        is_sound=np.pad(document.is_sound, missing),
    )


def _first_picture(document: Document, data: DataConfig, vision: VisionConfig) -> np.ndarray | None:
    return read_pixels(document.pictures[0], data, vision) if document.pictures else None


def majority_baseline(answers: Iterable[EvaluationAnswer]) -> dict[str, float]:
    """Per kind of question, the score of always giving its commonest answer; under "all", over all questions."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        by_kind[answer.kind][answer.reference] += 1
    hits = {kind: max(counts.values()) for kind, counts in by_kind.items()}
    scores = {kind: hits[kind] / counts.total() for kind, counts in sorted(by_kind.items())}
    total = sum(counts.total() for counts in by_kind.values())
    return scores | ({"all": sum(hits.values()) / total} if total else {})
