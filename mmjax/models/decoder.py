"""The decoder: layers, residuals over depth, and how layers are stacked, scanned and rematerialised."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mmjax.axes import TENSOR
from mmjax.config import LayerKind, ModelConfig
from mmjax.models.block_scan import TakingPart, scan_across_blocks
from mmjax.models.cache import DecoderCache, Earlier, MixerCache
from mmjax.models.gated_delta_net import GatedDeltaNet
from mmjax.models.grouped_attention import GroupedAttention
from mmjax.models.hyper_connections import HyperConnection, StreamWeights
from mmjax.models.layers import (
    DenseMlp,
    LayerNorm,
    PlainMlp,
    at_least_float32,
    norm_weight,
    normal,
    ones,
    parameter,
    scaled_norm,
    spread,
    use,
)
from mmjax.models.layout import (
    Segment,
    block_starts,
    layer_address,
    num_devices,
    parameter_stacks,
    plan_segments,
    stage_layers,
)
from mmjax.models.linear_attention import KimiDeltaAttention
from mmjax.models.moe import LatentMoe, RouterStatistics
from mmjax.models.sparse_attention import LatentAttention
from mmjax.models.stack import InStack, every_nth, gradients_together, scan_stack, stacked
from mmjax.parallel.fsdp import varying_like
from pallas_kernels.attention_residual.api import attention_residual

# Decisions of a layer: saved by rematerialisation, never taken twice.
DECISIONS = ("router_index", "router_threshold", "selected_keys")


def kept_results(model: ModelConfig) -> Callable[..., Any]:
    """What rematerialisation of a layer keeps, by name, and where."""
    kept = (*DECISIONS, *model.remat_keep)
    if not model.remat_offload:
        return jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept,
        names_which_can_be_offloaded=model.remat_offload,
        offload_src="device",
        offload_dst="pinned_host",
    )


def is_trained(_: tuple, variable: nnx.Variable) -> bool:
    """Filter of nnx: the variables that have gradients, as far as is known (see `ModelDefinition.assemble`)."""
    is_real = jnp.issubdtype(variable.get_value().dtype, jnp.inexact)
    return is_real and variable.get_metadata().get("is_trained", True)


def added_here(segment: Segment, additions: jax.Array | None) -> jax.Array | None:
    """[repeats, layers of the pattern, b, s, d] of `additions` [N, b, s, d]; None in a segment that gets none."""
    if additions is None or segment.first_layer >= additions.shape[0]:
        return None
    here = additions[segment.first_layer :][: segment.num_layers]
    return here.reshape(segment.num_repeats, len(segment.kinds), *additions.shape[1:])


class LayerRecord(NamedTuple):
    """What one layer reports besides its output. Leaves gain a leading repeats axis in a stack."""

    is_finite: jax.Array
    """bool: the running sum after the layer holds no infinity and no NaN on this device."""
    indexer_loss: jax.Array
    """Sum of the indexer's KL over this device's tokens."""
    router: RouterStatistics | None
    """None in a layer with a dense MLP."""
    hidden: "HiddenValues | None"
    cache: MixerCache | None
    """Of all tokens so far; None unless the decoder was given one."""


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
        self.input_norm = norm_weight(model, model.width)
        self.mlp_norm = norm_weight(model, model.width)
        if model.residual == "attention":
            self.mixer_residual = ResidualMix(model)
            self.mlp_residual = ResidualMix(model)
        elif model.residual == "hyper":
            self.mixer_streams = HyperConnection(model)
            self.mlp_streams = HyperConnection(model)
        self.mixer = make_mixer(model, mixer)
        self.mlp = LatentMoe(model) if mlp == "moe" else make_dense_mlp(model)

    def __call__(
        self,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        segment_ids: jax.Array,
        positions: jax.Array,
        earlier: Earlier | None = None,
        *,
        is_live: jax.Array | bool,
        num_finished: jax.Array | None = None,
        mlp_in_stack: InStack | None = None,
        keep_hidden: bool,
    ) -> tuple[jax.Array, LayerRecord]:
        """Add this layer's two outputs to `running_sum` [b, s, d], or to its streams [b, s, n, d] (`hyper`).

        `frozen` holds the sums of finished residual blocks (the embedding first), of which the first `num_finished`
        take part, or all. `is_live` is False in the first layer of a block, whose running sum holds nothing yet and
        must not take part in its first mix. `mlp_in_stack` is its MLP among those of its stack.
        """
        mixer_input, streams = self._enter("mixer", self.input_norm, running_sum, frozen, is_live, num_finished)
        mixer_output, indexer_loss, cache = self._mixer(mixer_input, segment_ids, positions, earlier)
        running_sum = self._leave("mixer", running_sum, mixer_output, streams)
        mlp_input, streams = self._enter("mlp", self.mlp_norm, running_sum, frozen, True, num_finished)
        mlp_output, router = self._mlp(mlp_input, segment_ids, mlp_in_stack)
        running_sum = self._leave("mlp", running_sum, mlp_output, streams)
        record = LayerRecord(
            is_finite=jnp.all(jnp.isfinite(running_sum)),
            indexer_loss=indexer_loss,
            router=router,
            hidden=HiddenValues(running_sum, mixer_output, mlp_output) if keep_hidden else None,
            cache=cache,
        )
        return running_sum, record

    def _enter(
        self,
        block: str,
        norm: nnx.Variable | LayerNorm,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        is_live: jax.Array | bool,
        num_finished: jax.Array | None,
    ) -> tuple[jax.Array, StreamWeights | None]:
        """What a block gets, normalised [b, s, d], and how its output joins the streams, if there are several."""
        inputs, streams = running_sum, None
        if self.model.residual == "attention":
            return getattr(self, f"{block}_residual")(running_sum, frozen, norm, is_live, num_finished), None
        if self.model.residual == "hyper":
            inputs, streams = getattr(self, f"{block}_streams").enter(running_sum)
        return scaled_norm(inputs, norm, self.model), streams

    def _leave(self, block: str, running_sum: jax.Array, output: jax.Array, streams: StreamWeights | None) -> jax.Array:
        if streams is None:
            return running_sum + output
        return getattr(self, f"{block}_streams").leave(running_sum, output, streams)

    def _mixer(
        self, inputs: jax.Array, segment_ids: jax.Array, positions: jax.Array, earlier: Earlier | None
    ) -> tuple[jax.Array, jax.Array, MixerCache | None]:
        no_loss = varying_like(jnp.zeros((), at_least_float32(inputs.dtype)), inputs)
        if earlier is not None:
            output, cache = self.mixer.extend(inputs, earlier.slots, positions, earlier.cache)
            return output, no_loss, cache
        match self.mixer:
            case LatentAttention():
                return *self.mixer(inputs, segment_ids, positions), None
            case GroupedAttention():
                return self.mixer(inputs, segment_ids, positions), no_loss, None
            case _:
                return self.mixer(inputs, segment_ids), no_loss, None

    def _mlp(
        self, inputs: jax.Array, segment_ids: jax.Array, in_stack: InStack | None
    ) -> tuple[jax.Array, RouterStatistics | None]:
        if isinstance(self.mlp, LatentMoe):
            return self.mlp(inputs, segment_ids, in_stack)
        return self.mlp(inputs), None


class Mixer(Protocol):
    """What all mixers can do, each with a kind of cache of its own; how one is called depends on its kind."""

    __call__: Callable[..., Any]

    def extend(
        self, inputs: jax.Array, slots: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, MixerCache]: ...

    def empty_cache(self, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> MixerCache: ...


def make_mixer(model: ModelConfig, kind: Literal["linear", "full"]) -> Mixer:
    """The mixer of a layer: linear attention, or the model's kind of full attention."""
    if kind == "linear":
        return KimiDeltaAttention(model) if model.linear_attention_kind == "kimi_delta" else GatedDeltaNet(model)
    return LatentAttention(model) if model.full_attention_kind == "latent" else GroupedAttention(model)


def make_dense_mlp(model: ModelConfig) -> nnx.Module:
    """The dense MLP of a layer, of the model's kind."""
    shape = {"width": model.width, "hidden_width": model.moe.dense_width, "has_bias": model.mlp_bias}
    start = {"initializer": normal(model.initializer_range), "dtype": model.parameter_dtype}
    if model.dense_mlp == "relu_squared":
        return PlainMlp(**shape, **start)
    return DenseMlp(activation=model.activation, **shape, **start)


class ResidualMix(nnx.Module):
    """Block attention residual: a learned query weighs the frozen block sums and the running sum of each token."""

    def __init__(self, model: ModelConfig):
        self.model = model
        self.norm = ones(model.width, model.parameter_dtype)
        # Zero: a uniform average at the start. A random query would let noise choose the sources.
        self.query = parameter(jax.nn.initializers.zeros, (model.width,), (None,), model.parameter_dtype)

    def __call__(
        self,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        norm_of_mix: nnx.Variable | LayerNorm,
        is_live: jax.Array | bool = True,
        num_finished: jax.Array | None = None,
    ) -> jax.Array:
        """The mix, normalised by the norm that follows it."""
        wide = at_least_float32(running_sum.dtype)
        if num_finished is not None:
            number = jnp.arange(len(frozen), dtype=num_finished.dtype)
            is_live = jnp.append(number < num_finished, jnp.asarray(is_live))
        scale = None
        if isinstance(norm_of_mix, nnx.Variable) and self.model.norm_scale == "plain":
            scale = use(norm_of_mix, wide)
        mix = attention_residual(
            (*frozen, running_sum) if is_live is not False else frozen,
            use(self.norm, wide),
            use(self.query, wide),
            epsilon=self.model.norm_epsilon,
            is_live=is_live if isinstance(is_live, jax.Array) else None,
            output_scale=scale,
        )
        return scaled_norm(mix, norm_of_mix, self.model) if scale is None else mix


class LayerPattern(nnx.Module):
    """The layers that one repeat of a segment holds."""

    def __init__(self, layers: Sequence[DecoderLayer]):
        self.layers = nnx.List(layers)


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final mix and norm, output head."""

    def __init__(self, model: ModelConfig):
        self.model = model
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        table_shape = (model.vocabulary_size, model.width)
        self.embedding = parameter(initializer, table_shape, ("vocabulary", "model_weight"), dtype)
        stack_axis = "stage" if model.pipeline_stages else None
        self.segments = nnx.List(
            [
                stacked(LayerPattern([DecoderLayer(model, kind) for kind in kinds]), num_repeats, stack_axis)
                for kinds, num_repeats in parameter_stacks(model)
            ]
        )
        if model.residual == "attention":
            self.output_residual = ResidualMix(model)
        self.norm = norm_weight(model, model.width)
        self.is_head_trained = True
        if not model.tied_head:
            self.head = parameter(initializer, table_shape[::-1], ("model_weight", "vocabulary"), dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`tokens` [b, s] -> [b, s, d] in the compute dtype."""
        # Gathered as it rests; read in at least float32, so that the gradients of a frequent token add up unrounded.
        resting = self.embedding.get_value().dtype
        table = use(self.embedding, resting).astype(at_least_float32(self.model.compute_dtype))
        local = tokens - lax.axis_index(TENSOR) * table.shape[0]
        is_here = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(is_here, local, 0), axis=0)
        return lax.psum(jnp.where(is_here[..., None], rows, 0), TENSOR).astype(self.model.compute_dtype)

    def head_weights(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """What hidden values are multiplied with to give logits: [D, W], this device's share of the vocabulary."""
        return use(self.embedding, dtype).T if self.model.tied_head else use(self.head, dtype)

    def empty_cache(self, rows: int, capacity: int) -> DecoderCache:
        """Of `rows` rows that hold nothing, with room for `capacity` tokens. Whole: not one device's share."""

        def stacked_cache(layer: DecoderLayer, num_repeats: int) -> MixerCache:
            cache = layer.mixer.empty_cache(rows, capacity, self.model.compute_dtype)
            return jax.tree.map(lambda array: jnp.broadcast_to(array, (num_repeats, *array.shape)), cache)

        layers = tuple(
            tuple(stacked_cache(layer, segment.num_repeats) for layer in stack.layers)
            for segment, stack in zip(plan_segments(self.model), self.segments, strict=True)
        )
        return DecoderCache(jnp.zeros((rows,), jnp.int32), layers)

    def __call__(
        self,
        embeddings: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        *,
        additions: jax.Array | None = None,
        cache: DecoderCache | None = None,
        keep_hidden: bool = False,
    ) -> tuple[jax.Array, tuple[tuple[LayerRecord, ...], ...]]:
        """Embeddings [b, s, d], segments [b, s] -> normed hidden values [b, s, d] and the layers' records.

        `positions` are [b, s], those within a token's document, or [3, b, s]: frame, row and column. `additions`
        [N, b, s, d] are added to the outputs of the first N layers, N the tower's number of deep layers.
        Records are nested as [segment][position in the pattern], leaves with a leading repeats axis.
        With a `cache` the rows go on behind the tokens that it holds: one document each, then padding (segment 0); the
        records hold what `extended_cache` makes the next one of.
        """
        stacks = zip(plan_segments(self.model), self.segments, strict=True)
        running_sum, frozen, records = self.run_segments(
            stacks,
            self.begin(embeddings),
            (),
            segment_ids,
            positions,
            additions=additions,
            cache=cache,
            keep_hidden=keep_hidden,
        )
        return self.finish(running_sum, frozen), records

    def begin(self, embeddings: jax.Array) -> jax.Array:
        """Embeddings [b, s, d] -> the running sum before the first layer."""
        if self.model.residual != "hyper":
            return embeddings
        num_streams = self.model.hyper_connections.num_streams
        return spread(embeddings[:, :, None], (*embeddings.shape[:2], num_streams, embeddings.shape[-1]))

    def finish(self, running_sum: jax.Array, frozen: tuple[jax.Array, ...]) -> jax.Array:
        """The running sum after the last layer -> normed hidden values [b, s, d]."""
        if self.model.residual == "attention":
            return self.output_residual(running_sum, frozen, self.norm)
        if self.model.residual == "hyper":
            running_sum = jnp.mean(running_sum, axis=2)
        return scaled_norm(running_sum, self.norm, self.model)

    def stage(self, number: int) -> list[tuple[Segment, LayerPattern]]:
        """The segments of a pipeline stage, and this device's parameters of them. Inside `shard_map`."""
        layers = stage_layers(self.model)[number]
        device = number % num_devices(self.model)

        def slot_of(layer: int) -> tuple[nnx.Module, int]:
            """The stack that holds a layer, and its place in this device's part of it."""
            address = layer_address(self.model, layer)
            kind_layers = parameter_stacks(self.model)[address.segment].num_repeats // num_devices(self.model)
            return self.segments[address.segment].layers[0], address.repeat - device * kind_layers

        stacks = []
        for segment in plan_segments(self.model, layers.start, layers.stop):
            pattern = []
            for position, kind in enumerate(segment.kinds):
                stack, start = slot_of(segment.first_layer + position)
                pattern.append(every_nth(stack, start, segment.kinds.count(kind), segment.num_repeats))
            stacks.append((segment, LayerPattern(pattern)))
        return stacks

    def run_segments(
        self,
        stacks: Iterable[tuple[Segment, LayerPattern]],
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        segment_ids: jax.Array,
        positions: jax.Array,
        *,
        additions: jax.Array | None = None,
        cache: DecoderCache | None = None,
        keep_hidden: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[tuple[LayerRecord, ...], ...]]:
        """Consecutive segments from `running_sum` and the sums of the blocks that are frozen before them.

        Returns both as they are after them, and the layers' records.
        """
        records = []
        for number, (segment, stack) in enumerate(stacks):
            if block_starts(self.model, segment).reshape(-1)[1:].any():
                assert cache is None and added_here(segment, additions) is None
                running_sum, frozen, segment_records = self._run_across_blocks(
                    segment, stack, running_sum, frozen, (segment_ids, positions), keep_hidden
                )
                records.append(segment_records)
                continue
            earlier = None if cache is None else (cache.slots(segment_ids), cache.layers[number])
            if segment.starts_block and self.model.residual == "attention":
                frozen = (*frozen, running_sum)
                running_sum = varying_like(jnp.zeros_like(running_sum), running_sum)
            running_sum, segment_records = self._run_segment(
                segment,
                stack,
                running_sum,
                frozen,
                segment_ids,
                positions,
                added_here(segment, additions),
                earlier,
                keep_hidden,
            )
            records.append(segment_records)
        return running_sum, frozen, tuple(records)

    def _run_segment(
        self,
        segment: Segment,
        stack: LayerPattern,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        segment_ids: jax.Array,
        positions: jax.Array,
        additions: jax.Array | None,
        earlier: tuple[jax.Array, tuple[MixerCache, ...]] | None,
        keep_hidden: bool,
    ) -> tuple[jax.Array, tuple[LayerRecord, ...]]:
        policy = kept_results(self.model)

        slots, caches = (None, None) if earlier is None else earlier

        def run_layer(layer: DecoderLayer, running_sum: jax.Array, earlier: Earlier | None, **options: Any):
            graph, state = nnx.split(layer)

            def apply(state, running_sum, frozen, segment_ids, positions, earlier):
                layer = nnx.merge(graph, state)
                return layer(running_sum, frozen, segment_ids, positions, earlier, **options, keep_hidden=keep_hidden)

            if self.model.remat == "layer":
                apply = jax.checkpoint(apply, policy=policy, prevent_cse=segment.num_repeats == 1)
            return apply(state, running_sum, frozen, segment_ids, positions, earlier)

        static_is_live = not segment.starts_block
        flags = None
        if segment.starts_block and segment.num_repeats > 1:
            flags = jnp.arange(segment.num_repeats) > 0

        def body(pattern: LayerPattern, running_sum: jax.Array, xs: tuple):
            number, flag, additions, caches = xs
            is_live = static_is_live if flag is None else flag
            records = []
            layers = list(pattern.layers)
            for position in range(len(layers)):
                if position + 1 < len(layers):
                    # Backward: what one layer's gradients are made of does not outlast the layer before it.
                    running_sum, layers[position + 1] = self._in_order(running_sum, layers[position + 1])
                layer = layers[position]
                earlier = None if slots is None or caches is None else Earlier(slots, caches[position])
                options = {"is_live": is_live if position == 0 else True}
                options["mlp_in_stack"] = InStack(stack.layers[position].mlp, number)
                running_sum, record = run_layer(layer, running_sum, earlier, **options)
                running_sum = running_sum if additions is None else running_sum + additions[position]
                records.append(record)
            return running_sum, tuple(records)

        numbers = jnp.arange(segment.num_repeats, dtype=jnp.int32)
        return scan_stack(stack, running_sum, body, (numbers, flags, additions, caches), remat=False)

    def _run_across_blocks(
        self,
        segment: Segment,
        stack: LayerPattern,
        running_sum: jax.Array,
        frozen: tuple[jax.Array, ...],
        places: tuple[jax.Array, jax.Array],
        keep_hidden: bool,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[LayerRecord, ...]]:
        """A segment in which other layers than the first begin blocks; `places` are segment ids and positions."""
        graphs, trained, others = zip(*(nnx.split(layer, is_trained, ...) for layer in stack.layers), strict=True)

        def run_layer(position, trained, others, running_sum, sums, part: TakingPart, places):
            def apply(trained, others, running_sum, sums, part: TakingPart, places):
                return nnx.merge(graphs[position], trained, others)(
                    running_sum,
                    sums,
                    *places,
                    is_live=True if part.is_live is None else part.is_live,
                    num_finished=part.num_finished,
                    keep_hidden=keep_hidden,
                )

            if self.model.remat == "layer":
                apply = jax.checkpoint(apply, policy=kept_results(self.model), prevent_cse=False)
            return apply(trained, others, running_sum, sums, part, places)

        starts = block_starts(self.model, segment)
        return scan_across_blocks(run_layer, trained, others, running_sum, frozen, starts, places)

    def _in_order(self, running_sum: jax.Array, later: DecoderLayer) -> tuple[jax.Array, DecoderLayer]:
        """Both as they are. Backward, all gradients of the layer `later` are done before the sum's goes on."""
        graph, trained, others = nnx.split(later, is_trained, ...)
        running_sum, trained = gradients_together((running_sum, trained))
        return running_sum, nnx.merge(graph, trained, others)
