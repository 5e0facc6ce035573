"""Held-out answers that are written side by side are those that a model writes token by token."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmjax.axes import CONTEXT
from mmjax.config import DataConfig, RunConfig, VisionConfig
from mmjax.data.batch import Batch
from mmjax.data.loader import Loader
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.parallel.context import join_positions, split_positions
from mmjax.training import evaluation

BYTES = ByteTokenizer()
ANSWERS = ["yes", "a", "no", "never ever", "b", "perhaps", "ab", "both"]
KNOWN = range(0, len(ANSWERS), 3)
# Of the made-up model.
TOKENS = [*b"abcabc", BYTES.end_token_id, BYTES.pad_token_id]


def next_token(document: list[int], known: list[list[int]]) -> int:
    """What a made-up model says behind `document`: what it knows by heart, else one of few tokens, the end often."""
    for whole in known:
        if whole[: len(document)] == document and len(document) < len(whole):
            return whole[len(document)]
    return TOKENS[zlib.crc32(bytes(map(_low, document))) % len(TOKENS)]


def _low(token: int) -> int:
    return token % 251


def token_by_token(prompt: list[int], budget: int, known: list[list[int]]) -> tuple[str, bool]:
    """The greedy answer, and whether it ended."""
    document = list(prompt)
    while len(document) < len(prompt) + budget:
        document.append(next_token(document, known))
        if document[-1] == BYTES.end_token_id:
            return BYTES.decode(document[len(prompt) : -1]).strip(), True
    return BYTES.decode(document[len(prompt) :]).strip(), False


@pytest.mark.parametrize(("rows", "num_devices"), [(1, 1), (3, 1), (3, 2)])
def test_answers_are_the_greedy_ones_and_what_is_known_is_asked_once(rows, num_devices, tmp_path: Path, monkeypatch):
    file = tmp_path / "held_out.jsonl"
    questions = [f"question {number}?" for number in range(len(ANSWERS))]
    with file.open("w") as lines:
        for question, answer in zip(questions, ANSWERS, strict=True):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages}) + "\n")
    data = DataConfig(source=str(file), eval_source=str(file), rows=rows, row_tokens=64, row_patches=0)
    loader = Loader(data, VisionConfig(num_layers=0), 0, "held_out")
    prompts, known = {}, []
    for item in loader.evaluation().batches():
        for asked in item.answers:
            row, segments = item.batch.tokens[asked.row], item.batch.segment_ids[asked.row]
            first = int(np.argmax(segments == segments[asked.start]))
            prompts[asked.number] = row[first : asked.start].tolist()
            if asked.number in KNOWN:
                known.append([*prompts[asked.number], *ANSWERS[asked.number].encode(), BYTES.end_token_id])
            budget = asked.budget
    passes: list[Batch] = []

    def reorder(batch: Batch, order: Callable[[np.ndarray, int], np.ndarray]) -> Batch:
        fields = ("tokens", "segment_ids", "loss_weight")
        return batch._replace(**{name: order(getattr(batch, name), num_devices) for name in fields})

    def predict(parameters: Any, router_biases: Any, frozen: Any, batch: Batch) -> np.ndarray:
        # What the devices hold, and give back, is not in row order where a row is split over them.
        batch = reorder(batch, join_positions)
        passes.append(batch)
        predicted = np.zeros_like(batch.tokens)
        for row, place in zip(*np.nonzero(batch.loss_weight), strict=True):
            segments = batch.segment_ids[row]
            first = int(np.argmax(segments == segments[place]))
            predicted[row, place] = next_token(batch.tokens[row, first : place + 1].tolist(), known)
        return split_positions(predicted, num_devices)

    monkeypatch.setattr(evaluation, "make_predict", lambda config, mesh: predict)
    monkeypatch.setattr(evaluation, "compile_together", lambda program, *inputs: program)
    monkeypatch.setattr(evaluation, "whole", np.asarray)
    monkeypatch.setattr(evaluation, "place_batch", lambda batch, mesh: reorder(batch, split_positions))
    mesh: Any = SimpleNamespace(shape={CONTEXT: num_devices})
    state: Any = SimpleNamespace(parameters={}, router_biases={}, frozen={})
    result = evaluation.Evaluator(RunConfig(data=data), loader, mesh)(state)

    expected = [token_by_token(prompts[number], budget, known) for number in range(len(ANSWERS))]
    assert [(answer.given, answer.is_finished) for answer in result.answers] == expected
    assert [answer.asked.question for answer in result.answers] == questions
    # Answers end early, late, wrongly and not at all: all of it was there to go wrong.
    assert {is_finished for _, is_finished in expected} == {True, False}
    right = [number for number, answer in enumerate(result.answers) if answer.is_right]
    assert set(KNOWN) <= set(right) and len(right) < len(ANSWERS)
    assert result.exact_match == len(right) / len(ANSWERS)
    shapes = {batch.tokens.shape for batch in passes}
    assert shapes == {(rows, 64)}
    for number in KNOWN:
        asked_in = [batch for batch in passes if questions[number].encode() in _as_bytes(batch)]
        assert len(asked_in) == 1


def _as_bytes(batch: Batch) -> bytes:
    return bytes(token if token < 256 else 0 for token in batch.tokens.ravel().tolist())
