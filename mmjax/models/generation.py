"""Continuing prompts token by token: greedy or drawn, from caches, with the model split over a mesh as in training."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.axes import DATA_AXES, TENSOR
from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.errors import NonFiniteError
from mmjax.models.cache import DecoderCache, cache_specs, extended_cache
from mmjax.models.layers import at_least_float32
from mmjax.models.layout import without_pipeline
from mmjax.models.multimodal import Arrays, ModelDefinition
from mmjax.parallel.processes import whole
from mmjax.parallel.sharding import variable_spec

NO_TOKEN = -1
"""Stands in place of a token in rows that have ended."""

# Rows are whole on a device: positions are not split.
_ROWS = PartitionSpec(DATA_AXES)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Logits are divided by it; 0 always takes the likeliest token (of equal ones the lowest)."""
    top_k: int = 0
    """Only so many of the likeliest tokens may be drawn; 0 allows all."""
    top_p: float = 1.0
    """Of those, only the likeliest that together have this probability; at least one."""
    seed: int = 0
    """A draw depends on the seed, the number of the prompt and the number of the token alone."""


class NextToken(NamedTuple):
    """What one step gives."""

    tokens: np.ndarray
    """[B] int32; NO_TOKEN in rows that have ended."""
    logits: jax.Array
    """[B, W], at least float32: what the tokens were chosen from."""


class _Choice(NamedTuple):
    """`Sampling` as arrays (NumPy's from the host), so that other values compile nothing anew."""

    seed: Any
    prompts: Any
    """[B] uint32: numbers of the prompts."""
    stops: Any
    """Tokens that end a row, and NO_TOKEN."""
    temperature: Any
    top_k: Any
    top_p: Any


class _State(NamedTuple):
    cache: DecoderCache
    tokens: jax.Array
    """[B] int32: chosen last, not yet in the cache."""
    positions: jax.Array
    """[B] int32: where they stand."""
    logits: jax.Array
    is_finite: jax.Array


def for_generation(model: ModelConfig) -> ModelConfig:
    """The same model without what only training needs; no token of a row depends on the rows beside it."""
    router = dataclasses.replace(model.moe.router, balancing="none", balance_coefficient=0.0, z_coefficient=0.0)
    # Buffers of equal size, which every platform can exchange.
    moe = dataclasses.replace(model.moe, overflow="rounds", transport="all_to_all", router=router)
    return without_pipeline(dataclasses.replace(model, moe=moe, remat="none"))


class Generator:
    """Continues batches of prompts with one model.

    One program reads prompts and one takes a step; each is compiled once for each shape of a batch and capacity.
    """

    def __init__(self, definition: ModelDefinition, arrays: tuple[Arrays, Arrays, Arrays], mesh: Mesh, num_tokens: int):
        """`arrays` are the parameters, router biases and frozen arrays of `definition`, on `mesh`; its model is one of
        `for_generation`. Tokens from `num_tokens` on are never chosen: the tokenizer has no text for them.
        """
        self._definition, self._arrays, self._mesh, self._num_tokens = definition, arrays, mesh, num_tokens
        variables = (definition.parameters, definition.router_biases, definition.frozen)
        self._array_specs = tuple(
            {path: variable_spec(v, mesh.shape) for path, v in group.items()} for group in variables
        )
        described = ({path: v.get_value() for path, v in group.items()} for group in variables)
        self._described = definition.assemble(*described)
        self._read = jax.jit(self._advance, static_argnames="is_greedy", donate_argnums=2)
        self._step = jax.jit(self._advance_one, static_argnames="is_greedy", donate_argnums=1)

    def stream(
        self,
        batch: Batch,
        *,
        max_new_tokens: int,
        capacity: int,
        stop_tokens: Sequence[int] = (),
        sampling: Sampling,
        prompt_numbers: Sequence[int] | None = None,
    ) -> Iterator[NextToken]:
        """The next token of every row of `batch` (on the host), step by step, at most `max_new_tokens` times.

        A row is one document, then padding; their number is a multiple of the devices that share them, and a row of
        padding alone has ended. A row ends with one of `stop_tokens`, which is given too. `capacity` is how many tokens
        a row may have in all. `prompt_numbers` [B] count the prompts for `sampling`, 0, 1, ... by default.

        Raises:
          NonFiniteError: the logits of a row are no numbers.
        """
        rows = len(batch.tokens)
        longest = int((batch.segment_ids > 0).sum(axis=1).max(initial=0))
        if longest + max_new_tokens > capacity:
            raise ValueError(f"{longest} tokens and {max_new_tokens} new ones exceed the capacity of {capacity}")
        stops = np.full(max(8, len(stop_tokens) + 1), NO_TOKEN, np.int32)
        stops[: len(stop_tokens)] = stop_tokens
        choice = _Choice(
            seed=np.uint32(sampling.seed),
            prompts=np.asarray(range(rows) if prompt_numbers is None else prompt_numbers, np.uint32),
            stops=stops,
            temperature=np.float32(sampling.temperature or 1.0),
            top_k=np.int32(sampling.top_k or self._num_tokens),
            top_p=np.float32(sampling.top_p),
        )
        is_greedy = sampling.temperature == 0
        placed = jax.tree.map(self._place, batch)
        state = self._read(self._arrays, placed, self._empty_cache(rows, capacity), choice, 0, is_greedy=is_greedy)
        for number in range(1, max_new_tokens + 1):
            following = None
            if number < max_new_tokens:
                # Before its tokens are read, so that the devices never wait for the host.
                following = self._step(
                    self._arrays, state.cache, state.tokens, state.positions, choice, number, is_greedy=is_greedy
                )
            tokens = whole(state.tokens)
            if not bool(state.is_finite):
                raise NonFiniteError(
                    "generation",
                    found=f"logits that are no numbers at token {number} of an answer",
                    expected="finite numbers",
                    remedy="look at the weights (and at the run that made them); try a wider compute dtype",
                )
            yield NextToken(tokens, state.logits)
            if following is None or np.isin(tokens, stops).all():
                return
            state = following

    def _empty_cache(self, rows: int, capacity: int) -> DecoderCache:
        shapes = jax.eval_shape(functools.partial(self._described.decoder.empty_cache, rows, capacity))
        return jax.tree.map(
            lambda leaf, spec: jnp.zeros(leaf.shape, leaf.dtype, device=NamedSharding(self._mesh, spec)),
            shapes,
            cache_specs(shapes),
        )

    def _place(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self._mesh, _ROWS)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _advance_one(
        self,
        arrays: tuple[Arrays, Arrays, Arrays],
        cache: DecoderCache,
        tokens: jax.Array,
        positions: jax.Array,
        choice: _Choice,
        number: jax.Array,
        *,
        is_greedy: bool,
    ) -> _State:
        """Put `tokens` into the cache and choose the ones behind them."""
        has_ended = jnp.isin(tokens, choice.stops)
        segment_ids = jnp.where(has_ended, 0, 1).astype(jnp.int32)
        batch = one_token_each(jnp.where(has_ended, 0, tokens), segment_ids, positions)
        return self._advance(arrays, batch, cache, choice, number, is_greedy=is_greedy)

    def _advance(
        self,
        arrays: tuple[Arrays, Arrays, Arrays],
        batch: Batch,
        cache: DecoderCache,
        choice: _Choice,
        number: jax.Array,
        *,
        is_greedy: bool,
    ) -> _State:
        """Put the tokens of `batch` into the cache and choose those behind them, number `number` of their answers."""
        specs = cache_specs(cache)
        logits, cache, positions = jax.shard_map(
            self._on_device,
            mesh=self._mesh,
            in_specs=(self._array_specs, jax.tree.map(lambda _: _ROWS, batch), specs),
            out_specs=(PartitionSpec(DATA_AXES, TENSOR), specs, _ROWS),
            check_vma=True,
        )(arrays, batch, cache)
        is_live = jnp.any(batch.segment_ids > 0, axis=1)
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(self._mesh, _ROWS))
        tokens = choose(logits[:, : self._num_tokens], choice, number, is_greedy=is_greedy)
        return _State(
            cache=cache,
            tokens=jnp.where(is_live, tokens, NO_TOKEN),
            positions=positions,
            logits=logits,
            is_finite=jnp.all(jnp.isfinite(logits) | ~is_live[:, None]),
        )

    def _on_device(
        self, arrays: tuple[Arrays, Arrays, Arrays], batch: Batch, cache: DecoderCache
    ) -> tuple[jax.Array, DecoderCache, jax.Array]:
        """(logits [b, W] of each row's last token, the cache, positions [b] behind the last tokens)."""
        model = self._definition.assemble(*arrays)
        hidden, records = model(batch, cache=cache)
        is_real = batch.segment_ids > 0
        num_new = jnp.sum(is_real, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(hidden, jnp.maximum(num_new - 1, 0)[:, None, None], axis=1)[:, 0]
        logits = jnp.einsum(
            "bd,dw->bw",
            last,
            model.decoder.head_weights(hidden.dtype),
            preferred_element_type=at_least_float32(hidden.dtype),
        )
        layers = tuple(tuple(record.cache for record in segment if record.cache is not None) for segment in records)
        # Frame, row and column of a token may lie apart; what follows stands behind all of them.
        positions = model.positions(batch).reshape(-1, *is_real.shape)
        positions = jnp.max(jnp.where(is_real[None], positions, -1), axis=(0, 2)) + 1
        return logits, extended_cache(cache, num_new, layers), positions


def one_token_each(tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> Batch:
    """A batch of one token a row: [b] each; segment 0 is a row that has none."""
    rows = tokens.shape[0]

    def nothing(*shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return jnp.zeros((rows, 0, *shape), dtype)

    return Batch(
        tokens=tokens[:, None],
        targets=jnp.zeros((rows, 1), jnp.int32),
        loss_weight=jnp.zeros((rows, 1), jnp.float32),
        segment_ids=segment_ids[:, None],
        positions=positions[:, None],
        feature_index=jnp.full((rows, 1), -1, jnp.int32),
        patches=nothing(1, dtype=jnp.float32),
        patch_segment_ids=nothing(),
        patch_position=nothing(3),
        patch_grid=nothing(3),
        patch_feature=nothing(),
        spectrograms=nothing(0, 0, dtype=jnp.float32),
        sound_index=jnp.full((rows, 1), -1, jnp.int32),
    )


def choose(logits: jax.Array, choice: _Choice, number: jax.Array, *, is_greedy: bool) -> jax.Array:
    """Tokens [B] int32 from logits [B, W], as number `number` of their answers."""
    if is_greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1) / choice.temperature.astype(logits.dtype)
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    ranked = jnp.where(rank < choice.top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where(before < choice.top_p.astype(before.dtype), ranked, -jnp.inf)

    def draw(prompt: jax.Array, ranked: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(choice.seed), prompt), number)
        return jax.random.categorical(key, ranked)

    drawn = jax.vmap(draw)(choice.prompts, ranked)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
