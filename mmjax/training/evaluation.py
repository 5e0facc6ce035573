"""Held-out exact match: answers generated greedily for packed rows, compared with the references."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.axes import CONTEXT, PIPE, TENSOR
from mmjax.checkpoint.adapters import define_run
from mmjax.config import RunConfig
from mmjax.data.batch import Batch
from mmjax.data.evaluation import EvaluationAnswer, EvaluationBatch
from mmjax.data.loader import Loader
from mmjax.models.multimodal import Arrays, MultimodalModel
from mmjax.parallel.context import join_positions
from mmjax.parallel.processes import compile_together, whole
from mmjax.parallel.sharding import spec
from mmjax.training.pipeline_step import pipeline_forward
from mmjax.training.step import TrainState, batch_specs, place_batch, specs_of
from pallas_kernels.cross_entropy.api import greedy_tokens


def make_predict(config: RunConfig, mesh: Mesh):
    """Jitted `(parameters, router_biases, frozen, batch) -> [B, S] int32`: the likeliest next token.

    It is known where `loss_weight` is not 0, and 0 elsewhere. Positions are in the order of the placed batch
    (`parallel.context`).
    """
    definition = define_run(config)

    def on_device(parameters: Arrays, router_biases: Arrays, frozen: Arrays, batch: Batch) -> jax.Array:
        model = definition.assemble(parameters, router_biases, frozen)
        if mesh.shape[PIPE] > 1:
            return pipeline_forward(config, model, batch, choose)
        hidden, _ = model(batch)
        return choose(model, hidden, batch)

    def choose(model: MultimodalModel, hidden: jax.Array, batch: Batch) -> jax.Array:
        tokens = greedy_tokens(
            hidden.reshape(-1, hidden.shape[-1]),
            model.decoder.head_weights(hidden.dtype),
            batch.loss_weight.reshape(-1) != 0,
            chunk_tokens=config.model.loss_chunk_tokens,
            vocabulary_axis=TENSOR,
        )
        return tokens.reshape(batch.tokens.shape)

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(
                specs_of(definition.parameters, mesh),
                specs_of(definition.router_biases, mesh),
                specs_of(definition.frozen, mesh),
                batch_specs(),
            ),
            out_specs=spec("batch", "position"),
            check_vma=True,
        )
    )


@dataclass(frozen=True)
class GivenAnswer:
    """A held-out question with the answer that the model generated."""

    asked: EvaluationAnswer
    given: str
    is_finished: bool
    """The answer ended within its budget; one that runs on is wrong whatever it began with."""

    @property
    def is_right(self) -> bool:
        return self.is_finished and self.given == self.asked.reference


@dataclass(frozen=True)
class EvaluationResult:
    """All held-out questions with their answers."""

    answers: tuple[GivenAnswer, ...]
    num_left_out: int = 0
    """Samples that are bad or too long, of which nothing is asked."""

    @property
    def exact_match(self) -> float:
        return sum(answer.is_right for answer in self.answers) / max(1, len(self.answers))


class Evaluator:
    """Generates the held-out answers of a loader; its program is compiled once."""

    def __init__(self, config: RunConfig, loader: Loader, mesh: Mesh):
        self._predict: Callable[..., jax.Array] = make_predict(config, mesh)
        self._is_compiled = False
        self._mesh = mesh
        self._tokenizer = loader.tokenizer
        self._questions = loader.evaluation()
        self._num_left_out = loader.num_left_out

    def __call__(self, state: TrainState) -> EvaluationResult:
        """The greedy answers, all written side by side.

        Each pass compares a draft of every answer with what the model predicts from it. Up to the first token that
        differs, and with it, the prediction is the greedy answer, since attention is causal and documents are
        isolated; so each pass adds a token at least, and the draft decides only how many passes it takes. References
        are the first drafts: what the model has learnt is settled in one pass. Answers that are not settled are packed
        anew for the next pass. (Experts that drop what overflows break the isolation: an answer then depends on its
        neighbours, as it does in training.)
        """
        drafts, answers = self._questions.references(), {}
        while drafts:
            unsettled = {}
            for item in self._questions.batches(drafts):
                predicted = self._predict_answers(state, item)
                for asked in item.answers:
                    tokens = predicted[asked.row, asked.start - 1 :][: asked.budget]
                    differs = np.flatnonzero(tokens != drafts[asked.number])
                    settled = tokens[: differs[0] + 1].tolist() if differs.size else tokens.tolist()
                    is_finished = self._tokenizer.end_token_id in settled
                    if is_finished or len(settled) == asked.budget:
                        given = settled[: settled.index(self._tokenizer.end_token_id)] if is_finished else settled
                        text = self._tokenizer.decode(given).strip()
                        answers[asked.number] = GivenAnswer(asked, text, is_finished)
                    else:
                        unsettled[asked.number] = tokens
            drafts = unsettled
        return EvaluationResult(tuple(answers[number] for number in sorted(answers)), self._num_left_out)

    def _predict_answers(self, state: TrainState, item: EvaluationBatch) -> np.ndarray:
        """[B, S]: the likeliest token behind each position that an answer's token is predicted from."""
        is_wanted = np.zeros_like(item.batch.loss_weight)
        for asked in item.answers:
            is_wanted[asked.row, asked.start - 1 :][: asked.budget] = 1
        placed = place_batch(item.batch._replace(loss_weight=is_wanted), self._mesh)
        inputs = (state.parameters, state.router_biases, state.frozen, placed)
        if not self._is_compiled:
            self._is_compiled = True
            self._predict = compile_together(self._predict, *inputs)
        return join_positions(whole(self._predict(*inputs)), self._mesh.shape[CONTEXT])
