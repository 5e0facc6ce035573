"""Held-out exact match: answers generated greedily for packed rows, compared with the references."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mmjax.axes import TENSOR
from mmjax.checkpoint.adapters import define_run
from mmjax.config import RunConfig
from mmjax.data.batch import Batch
from mmjax.data.evaluation import EvaluationAnswer
from mmjax.data.loader import Loader
from mmjax.models.multimodal import Arrays
from mmjax.parallel.processes import compile_together, whole
from mmjax.parallel.sharding import spec
from mmjax.training.step import TrainState, batch_specs, place_batch, specs_of
from pallas_kernels.cross_entropy.api import greedy_tokens


def make_predict(config: RunConfig, mesh: Mesh):
    """Jitted `(parameters, router_biases, frozen, batch) -> [B, S] int32`: the likeliest next token everywhere."""
    definition = define_run(config)

    def on_device(parameters: Arrays, router_biases: Arrays, frozen: Arrays, batch: Batch) -> jax.Array:
        model = definition.assemble(parameters, router_biases, frozen)
        hidden, _ = model(batch)
        head = model.decoder.head_weights(hidden.dtype)
        tokens = greedy_tokens(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            chunk_tokens=config.model.loss_chunk_tokens,
            vocabulary_axis=TENSOR,
        )
        return tokens.reshape(batch.tokens.shape)

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs_of(definition.parameters), PartitionSpec(), specs_of(definition.frozen), batch_specs()),
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
        self._batches = loader.evaluation()

    def __call__(self, state: TrainState) -> EvaluationResult:
        answers = []
        for item in self._batches:
            tokens = self._generate(state, item.batch, item.answers)
            for asked in item.answers:
                generated = tokens[asked.row, asked.start : asked.start + asked.budget].tolist()
                is_finished = self._tokenizer.end_token_id in generated
                if is_finished:
                    generated = generated[: generated.index(self._tokenizer.end_token_id)]
                answers.append(GivenAnswer(asked, self._tokenizer.decode(generated).strip(), is_finished))
        return EvaluationResult(tuple(answers))

    def _generate(self, state: TrainState, batch: Batch, answers: list[EvaluationAnswer]) -> np.ndarray:
        """Tokens [B, S] with every answer replaced by the greedy one.

        All answers are decoded side by side: each pass rewrites every answer token with what the model predicts from
        the tokens before it. After n passes the first n tokens of each answer are the greedy ones, since attention is
        causal and documents are isolated; a pass that changes nothing ends it. (Experts that drop what overflows break
        the isolation: an answer then depends on its neighbours, as it does in training.)
        """
        is_answer = np.zeros(batch.tokens.shape, bool)
        for asked in answers:
            is_answer[asked.row, asked.start : asked.start + asked.budget] = True
        tokens = np.where(is_answer, self._tokenizer.pad_token_id, batch.tokens).astype(np.int32)
        for _ in range(max(asked.budget for asked in answers)):
            placed = place_batch(batch._replace(tokens=tokens), self._mesh)
            inputs = (state.parameters, state.router_biases, state.frozen, placed)
            if not self._is_compiled:
                self._is_compiled = True
                self._predict = compile_together(self._predict, *inputs)
            predicted = whole(self._predict(*inputs))
            rewritten = np.where(is_answer, np.roll(predicted, 1, axis=1), tokens).astype(np.int32)
            if np.array_equal(rewritten, tokens):
                break
            tokens = rewritten
        return tokens
