"""The decoder: layers, attention residuals over depth, and how layers are stacked, scanned and rematerialised."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mmjax.axes import TENSOR
from mmjax.config import LayerKind, ModelConfig, layer_kinds
from mmjax.models.layers import DenseMlp, at_least_float32, normal, ones, parameter, rms_norm, use
from mmjax.models.linear_attention import KimiDeltaAttention
from mmjax.models.moe import LatentMoe, RouterStatistics
from mmjax.models.sparse_attention import LatentAttention
from mmjax.models.stack import scan_stack, stacked
from mmjax.parallel.fsdp import varying_like
from pallas_kernels.attention_residual.api import attention_residual

# Decisions of a layer: saved by rematerialisation, never taken twice.
DECISIONS = ("router_index", "router_threshold", "selected_keys")


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of one residual block that repeat a pattern of layer kinds: one stack of parameters."""

    first_layer: int
    kinds: tuple[LayerKind, ...]
    num_repeats: int
    starts_block: bool

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.num_repeats


def plan_segments(model: ModelConfig) -> tuple[Segment, ...]:
    """Split the decoder into segments, each as long a repetition as its residual block allows.

    Kimi-K3 (blocks of 12 layers, pattern of 4) gets 13 segments with 36 layer bodies for its 93 layers.
    """
    kinds = layer_kinds(model)
    block_layers = model.residual_block_layers if model.residual == "attention" else model.num_layers
    segments = []
    for block_start in range(0, model.num_layers, block_layers):
        block_end = min(block_start + block_layers, model.num_layers)
        layer = block_start
        while layer < block_end:
            period, num_repeats = _longest_repetition(kinds[layer:block_end])
            segment = Segment(layer, kinds[layer : layer + period], num_repeats, layer == block_start)
            segments.append(segment)
            layer += segment.num_layers
    return tuple(segments)


def _longest_repetition(kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
    """(period, repeats) of the longest repetition that `kinds` begins with; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        num_repeats = 1
        while kinds[period * num_repeats :][:period] == kinds[:period]:
            num_repeats += 1
        if num_repeats > 1 and period * num_repeats > best[0] * best[1]:
            best = (period, num_repeats)
    return best


class LayerAddress(NamedTuple):
    """Where a decoder layer's parameters lie: `decoder.segments.{segment}.layers.{position}.*[repeat]`."""

    segment: int
    position: int
    repeat: int


def layer_address(model: ModelConfig, layer: int) -> LayerAddress:
    for index, segment in enumerate(plan_segments(model)):
        offset = layer - segment.first_layer
        if 0 <= offset < segment.num_layers:
            return LayerAddress(index, offset % len(segment.kinds), offset // len(segment.kinds))
    raise ValueError(f"layer {layer} is outside 0..{model.num_layers - 1}")


class LayerRecord(NamedTuple):
    """What one layer reports besides its output. Leaves gain a leading repeats axis in a stack."""

    is_finite: jax.Array
    """bool: the running sum after the layer holds no infinity and no NaN on this device."""
    indexer_loss: jax.Array
    """Sum of the indexer's KL over this device's tokens."""
    router: RouterStatistics | None
    """None in a layer with a dense MLP."""
    hidden: "HiddenValues | None"


class HiddenValues(NamedTuple):
    """Values inside one layer, `[b, s, d]` each; kept on request only."""

    running_sum: jax.Array
    mixer_output: jax.Array
    mlp_output: jax.Array


class DecoderLayer(nnx.Module):
    """One mixer (linear or full attention) and one MLP (dense or mixture of experts) with their residual mixes."""

    def __init__(self, model: ModelConfig, kind: LayerKind):
        mixer, mlp = kind
        self.model = model
        dtype = model.parameter_dtype
        self.input_norm = ones(model.width, dtype)
        self.mlp_norm = ones(model.width, dtype)
        if model.residual == "attention":
            self.mixer_residual = ResidualMix(model)
            self.mlp_residual = ResidualMix(model)
        self.mixer = LatentAttention(model) if mixer == "full" else KimiDeltaAttention(model)
        self.mlp = (
            LatentMoe(model)
            if mlp == "moe"
            else DenseMlp(
                width=model.width,
                hidden_width=model.moe.dense_width,
                activation=model.activation,
                initializer=normal(model.initializer_range),
                dtype=dtype,
            )
        )

    def __call__(
        self,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        segment_ids: jax.Array,
        *,
        is_live: jax.Array | bool,
        keep_hidden: bool,
    ) -> tuple[jax.Array, LayerRecord]:
        """Add this layer's two outputs to `running_sum` [b, s, d].

        `frozen` holds the sums of finished residual blocks (the embedding first). `is_live` is False in the first layer
        of a block, whose running sum holds nothing yet and must not take part in its first mix.
        """
        wide = at_least_float32(running_sum.dtype)
        mixer_input = self._mix("mixer_residual", running_sum, frozen, is_live)
        mixer_output, indexer_loss = self._mixer(
            rms_norm(mixer_input, use(self.input_norm, wide), self.model.norm_epsilon), segment_ids
        )
        running_sum = running_sum + mixer_output
        mlp_input = self._mix("mlp_residual", running_sum, frozen, True)
        mlp_output, router = self._mlp(
            rms_norm(mlp_input, use(self.mlp_norm, wide), self.model.norm_epsilon), segment_ids > 0
        )
        running_sum = running_sum + mlp_output
        record = LayerRecord(
            is_finite=jnp.all(jnp.isfinite(running_sum)),
            indexer_loss=indexer_loss,
            router=router,
            hidden=HiddenValues(running_sum, mixer_output, mlp_output) if keep_hidden else None,
        )
        return running_sum, record

    def _mix(self, name: str, running_sum: jax.Array, frozen: tuple[jax.Array, ...], is_live) -> jax.Array:
        return getattr(self, name)(running_sum, frozen, is_live) if self.model.residual == "attention" else running_sum

    def _mixer(self, inputs: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        if isinstance(self.mixer, LatentAttention):
            return self.mixer(inputs, segment_ids)
        no_loss = jnp.zeros((), at_least_float32(inputs.dtype))
        return self.mixer(inputs, segment_ids), varying_like(no_loss, inputs)

    def _mlp(self, inputs: jax.Array, is_real: jax.Array) -> tuple[jax.Array, RouterStatistics | None]:
        return self.mlp(inputs, is_real) if isinstance(self.mlp, LatentMoe) else (self.mlp(inputs), None)


class ResidualMix(nnx.Module):
    """Block attention residual: a learned query weighs the frozen block sums and the running sum of each token."""

    def __init__(self, model: ModelConfig):
        self.epsilon = model.norm_epsilon
        self.norm = ones(model.width, model.parameter_dtype)
        # Zero: a uniform average at the start. A random query would let noise choose the sources.
        self.query = parameter(jax.nn.initializers.zeros, (model.width,), (None,), model.parameter_dtype)

    def __call__(
        self, running_sum: jax.Array, frozen: tuple[jax.Array, ...], is_live: jax.Array | bool = True
    ) -> jax.Array:
        wide = at_least_float32(running_sum.dtype)
        return attention_residual(
            (*frozen, running_sum) if is_live is not False else frozen,
            use(self.norm, wide),
            use(self.query, wide),
            epsilon=self.epsilon,
            is_live=is_live if isinstance(is_live, jax.Array) else None,
        )


class LayerPattern(nnx.Module):
    """The layers that one repeat of a segment holds."""

    def __init__(self, model: ModelConfig, kinds: tuple[LayerKind, ...]):
        self.layers = nnx.List([DecoderLayer(model, kind) for kind in kinds])


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final mix and norm, output head."""

    def __init__(self, model: ModelConfig):
        self.model = model
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        table_shape = (model.vocabulary_size, model.width)
        self.embedding = parameter(initializer, table_shape, ("vocabulary", "model_weight"), dtype)
        self.segments = nnx.List(
            [stacked(LayerPattern(model, segment.kinds), segment.num_repeats) for segment in plan_segments(model)]
        )
        if model.residual == "attention":
            self.output_residual = ResidualMix(model)
        self.norm = ones(model.width, dtype)
        self.head = parameter(initializer, table_shape[::-1], ("model_weight", "vocabulary"), dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`tokens` [b, s] -> [b, s, d] in the compute dtype."""
        # In at least float32, so that the gradients of a frequent token add up without rounding.
        table = use(self.embedding, at_least_float32(self.model.compute_dtype))
        local = tokens - lax.axis_index(TENSOR) * table.shape[0]
        is_here = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(is_here, local, 0), axis=0)
        return lax.psum(jnp.where(is_here[..., None], rows, 0), TENSOR).astype(self.model.compute_dtype)

    def __call__(
        self, embeddings: jax.Array, segment_ids: jax.Array, *, keep_hidden: bool = False
    ) -> tuple[jax.Array, tuple[tuple[LayerRecord, ...], ...]]:
        """`embeddings` [b, s, d], `segment_ids` [b, s] -> normed hidden values [b, s, d] and the layers' records.

        Records are nested as [segment][position in the pattern], leaves with a leading repeats axis.
        """
        running_sum, frozen, records = embeddings, (), []
        for segment, stack in zip(plan_segments(self.model), self.segments, strict=True):
            if segment.starts_block and self.model.residual == "attention":
                frozen = (*frozen, running_sum)
                running_sum = varying_like(jnp.zeros_like(running_sum), running_sum)
            running_sum, segment_records = self._run_segment(
                segment, stack, running_sum, frozen, segment_ids, keep_hidden
            )
            records.append(segment_records)
        if self.model.residual == "attention":
            running_sum = self.output_residual(running_sum, frozen)
        scale = use(self.norm, at_least_float32(running_sum.dtype))
        return rms_norm(running_sum, scale, self.model.norm_epsilon), tuple(records)

    def _run_segment(
        self,
        segment: Segment,
        stack: LayerPattern,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        segment_ids: jax.Array,
        keep_hidden: bool,
    ) -> tuple[jax.Array, tuple[LayerRecord, ...]]:
        policy = jax.checkpoint_policies.save_only_these_names(*DECISIONS)

        def run_layer(layer: DecoderLayer, running_sum: jax.Array, is_live: jax.Array | bool):
            graph, state = nnx.split(layer)

            def apply(state, running_sum, frozen, segment_ids):
                return nnx.merge(graph, state)(
                    running_sum, frozen, segment_ids, is_live=is_live, keep_hidden=keep_hidden
                )

            if self.model.remat == "layer":
                apply = jax.checkpoint(apply, policy=policy, prevent_cse=segment.num_repeats == 1)
            return apply(state, running_sum, frozen, segment_ids)

        static_is_live = not segment.starts_block
        flags = None
        if segment.starts_block and segment.num_repeats > 1:
            flags = jnp.arange(segment.num_repeats) > 0

        def body(pattern: LayerPattern, running_sum: jax.Array, flag: jax.Array | None):
            is_live = static_is_live if flag is None else flag
            records = []
            for position, layer in enumerate(pattern.layers):
                running_sum, record = run_layer(layer, running_sum, is_live if position == 0 else True)
                records.append(record)
            return running_sum, tuple(records)

        return scan_stack(stack, running_sum, body, flags, remat=False)
