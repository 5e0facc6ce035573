"""Stable LatentMoE: router, routed experts in a latent space, shared experts, and what balancing counts."""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import ARRAY_AXIS_OF_EXPERTS, DATA_AXES, MESH_AXES_OF_EXPERTS, TENSOR
from mmjax.config import ModelConfig
from mmjax.models.layers import (
    DenseMlp,
    Initializer,
    LoraWeight,
    at_least_float32,
    normal,
    ones,
    parameter,
    project,
    rms_norm,
    spread,
    use,
)
from mmjax.models.router_losses import load_balance_loss, z_loss
from mmjax.models.stack import InStack, gradients_together
from mmjax.parallel.expert import Exchanged, ExpertExchange, exchange_experts
from mmjax.parallel.fsdp import make_varying, varying_like
from pallas_kernels.moe.api import (
    expert_mlp,
    routed_experts,
    router_logits,
    router_scores,
    select_experts,
    weigh_experts,
)
from pallas_kernels.moe.mxfp4 import GROUP, PackedWeight


class RouterBias(nnx.Variable):
    """Correction bias of a router [E], at least float32: moved by balancing once a step, never by a gradient."""


class PackedExperts(nnx.Variable):
    """Codes or scales of routed experts in MXFP4, uint8: never trained."""


def _random_bytes(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    return jax.random.bits(key, shape, dtype)


@functools.cache
def _scale_of(standard_deviation: float) -> Initializer:
    """Scale bytes with which random codes, whose root mean square is 2.93, come nearest to this deviation."""
    exponent = round(math.log2(standard_deviation / 2.93)) if standard_deviation else -127
    return jax.nn.initializers.constant(127 + max(-127, exponent))


class RouterStatistics(NamedTuple):
    """What balancing needs, counted over real tokens. Sums over devices and micro-batches are sums of leaves."""

    load: jax.Array
    """[E] int32: tokens that took each expert."""
    histogram: jax.Array
    """[E, bins] int32: tokens by the bias each expert would have needed; no bins unless balancing is `quantile`."""
    dropped: jax.Array
    """int32: choices that an exchange with overflow `drop` left out."""
    rounds: jax.Array
    """int32: rounds of the exchange; 0 where nothing is exchanged."""
    balance_loss: jax.Array
    z_loss: jax.Array
    """Sums over tokens of the router's losses, differentiable; 0 where their coefficients are 0."""


def histogram_range(bias: jax.Array, num_bins: int) -> tuple[jax.Array, jax.Array]:
    """(lower end, bin width) of the histogram of needed biases, [...] each, for correction biases [..., E].

    Scores lie in [0, 1], so a needed bias lies within 1 of the range of the current biases.
    """
    lowest = jnp.min(bias, axis=-1) - 1
    return lowest, (jnp.max(bias, axis=-1) + 1 - lowest) / num_bins


def needed_bias_histogram(
    scores: jax.Array, threshold: jax.Array, bias: jax.Array, is_real: jax.Array, num_bins: int
) -> jax.Array:
    """Count per expert the bias it would have needed to be the last one a token takes.

        needed[t, e] = threshold[t] - scores[t, e]

    `scores` [t, E], `threshold` [t], `bias` [E], `is_real` [t] bool -> [E, bins] int32.
    """
    num_experts = bias.shape[0]
    lowest, width = histogram_range(bias, num_bins)
    bins = jnp.floor((threshold[:, None] - scores - lowest) / width).astype(jnp.int32)
    bins = jnp.clip(bins, 0, num_bins - 1) + num_bins * jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    bins = jnp.where(is_real[:, None], bins, num_experts * num_bins)
    counts = jnp.zeros((num_experts * num_bins,), jnp.int32).at[bins.reshape(-1)].add(1, mode="drop")
    return counts.reshape(num_experts, num_bins)


class LatentMoe(nnx.Module):
    """Mixture of experts that work at a latent width between two projections, plus experts that every token takes."""

    def __init__(self, model: ModelConfig):
        moe = model.moe
        self.model = model
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        wide = at_least_float32(dtype)
        self.router = parameter(initializer, (model.width, moe.num_experts), ("model_weight", None), wide)
        if moe.router.correction_bias:
            self.bias = parameter(jax.nn.initializers.zeros, (moe.num_experts,), (None,), wide, kind=RouterBias)
        width = moe.latent_width or model.width
        if moe.latent_width:
            self.latent_down = parameter(initializer, (model.width, width), ("model_weight", None), dtype)
            if moe.latent_norm:
                self.latent_norm = ones(width, dtype)
            self.latent_up = parameter(initializer, (width, model.width), (None, "model_weight"), dtype)
        experts = ARRAY_AXIS_OF_EXPERTS[moe.expert_axes]
        shape, array_axes = (moe.num_resident_experts, width, moe.expert_width), (experts, None, "expert_hidden")
        self._add_experts("gate", shape, array_axes)
        self._add_experts("up", shape, array_axes)
        shape, array_axes = (moe.num_resident_experts, moe.expert_width, width), (experts, "expert_hidden", None)
        self._add_experts("down", shape, array_axes)
        if moe.num_shared_experts:
            self.shared = DenseMlp(
                width=model.width,
                hidden_width=moe.shared_hidden_width,
                activation=model.activation,
                initializer=initializer,
                dtype=dtype,
            )
            if moe.shared_gate == "sigmoid":
                self.shared_gate = parameter(initializer, (model.width, 1), ("model_weight", None), dtype)

    def _add_experts(self, name: str, shape: tuple[int, int, int], array_axes: tuple[str | None, ...]) -> None:
        """The variable `name` [E, in, out], or packed `name`_codes [E, out, in/2] and `name`_scales [E, out, in/32]."""
        if self.model.moe.expert_storage == "dense":
            initializer, dtype = normal(self.model.initializer_range), self.model.parameter_dtype
            setattr(self, name, parameter(initializer, shape, array_axes, dtype))
            return
        experts, inputs, outputs = shape
        array_axes = (array_axes[0], array_axes[2], array_axes[1])
        for part, width, initializer in (
            ("codes", 2, _random_bytes),
            ("scales", GROUP, _scale_of(self.model.initializer_range)),
        ):
            packed = parameter(
                initializer, (experts, outputs, inputs // width), array_axes, np.uint8, kind=PackedExperts
            )
            setattr(self, f"{name}_{part}", packed)

    def _expert_weight(self, name: str, dtype: jax.typing.DTypeLike) -> jax.Array | PackedWeight:
        """[e, in, out] of this device's experts, frozen or trained, without adapters; or packed."""
        variable = self._expert_variable(name)
        if isinstance(variable, nnx.Variable):
            return make_varying(use(variable, dtype))
        return {"codes": use(variable["codes"], np.uint8), "scales": use(variable["scales"], np.uint8)}

    def _expert_variable(self, name: str) -> nnx.Variable | dict[str, nnx.Variable]:
        if self.model.moe.expert_storage == "mxfp4":
            return {part: getattr(self, f"{name}_{part}") for part in ("codes", "scales")}
        weight = getattr(self, name)
        return cast(nnx.Variable, weight.lora_base) if isinstance(weight, LoraWeight) else weight

    def _is_trained(self, name: str) -> bool:
        variable = self._expert_variable(name)
        return isinstance(variable, nnx.Variable) and variable.get_metadata().get("is_trained", True)

    def _expert_adapters(self, dtype: jax.typing.DTypeLike) -> dict[str, tuple[jax.Array, jax.Array]] | None:
        """Of each adapted projection: down [e, in, r] and up [e, r, out] of this device's experts, scaled."""
        adapters = {}
        for name in ("gate", "up", "down"):
            weight = getattr(self, name, None)
            if isinstance(weight, LoraWeight):
                down, up = use(weight.down, dtype), use(weight.up, dtype) * weight.scale
                if down.ndim == 2:
                    down = spread(down[None], (up.shape[0], *down.shape))
                adapters[name] = make_varying((down, up), (*DATA_AXES, TENSOR))
        return adapters or None

    def __call__(
        self, inputs: jax.Array, segment_ids: jax.Array, in_stack: InStack | None = None
    ) -> tuple[jax.Array, RouterStatistics]:
        """`inputs` [b, s, d], `segment_ids` [b, s] int32 -> [b, s, d] and this device's counts.

        Padding (segment 0) takes no routed expert and is counted nowhere. The router sees the full width. `in_stack`
        is this module among those of other layers: what seldom runs reads frozen experts there.
        """
        moe = self.model.moe
        tokens, is_real = inputs.reshape(-1, inputs.shape[-1]), segment_ids.reshape(-1) > 0
        index, weight, counts = self._route(tokens, segment_ids)
        latent = tokens
        if moe.latent_width:
            latent = project("td,dr->tr", tokens, self.latent_down)
        wide = at_least_float32(tokens.dtype)
        index = jnp.where(is_real[:, None], index, -1)
        exchanged = self._apply_experts(tokens, latent, index, weight.astype(wide), in_stack)
        # Each device of the tensor axis holds a share of the experts' hidden width. Sums are wide, what is given out,
        # and kept if asked for, is as wide as a row.
        mixed, shared = checkpoint_name(lax.psum(exchanged.mixed, TENSOR).astype(tokens.dtype), "experts"), None
        if exchanged.meanwhile is not None:
            shared = self.shared.output(exchanged.meanwhile)
            if moe.shared_gate == "sigmoid":
                shared *= jax.nn.sigmoid(project("td,do->to", tokens, self.shared_gate))
            if self._is_exchanged():
                # Else XLA joins it with the product after the exchange, and nothing hides the last way back.
                mixed, shared = lax.optimization_barrier((mixed, shared))
        if moe.latent_width:
            if moe.latent_norm:
                mixed = rms_norm(mixed.astype(wide), use(self.latent_norm, wide), self.model.norm_epsilon)
            result = project("tr,rd->td", mixed.astype(tokens.dtype), self.latent_up)
        else:
            result = mixed.astype(tokens.dtype)
        if shared is not None:
            result = result + shared
        statistics = counts._replace(dropped=exchanged.num_dropped, rounds=exchanged.num_rounds)
        return result.reshape(inputs.shape), statistics

    def _route(self, tokens: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array, RouterStatistics]:
        """(experts taken [t, A], their weights [t, A], statistics without those of the exchange)."""
        moe, router = self.model.moe, self.model.moe.router
        wide = at_least_float32(tokens.dtype)
        logits = router_logits(tokens, use(self.router, wide))
        bias = self.bias.get_value() if router.correction_bias else jnp.zeros((moe.num_experts,), wide)
        selection = select_experts(
            logits,
            bias,
            experts_per_token=moe.experts_per_token,
            scoring=router.scoring,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
        )
        # Named to be saved by rematerialisation: taken again, a tie could fall the other way.
        index = checkpoint_name(selection.index, "router_index")
        threshold = checkpoint_name(selection.threshold, "router_threshold")
        weight = weigh_experts(
            logits, index, scoring=router.scoring, renormalise=router.renormalise, scale=router.scale
        )
        is_real = segment_ids.reshape(-1) > 0
        counted = jnp.where(is_real[:, None], index, moe.num_experts)
        load = jnp.zeros((moe.num_experts,), jnp.int32).at[counted.reshape(-1)].add(1, mode="drop")
        num_bins = router.quantile_bins if router.balancing == "quantile" else 0
        scores = lax.stop_gradient(router_scores(logits, router.scoring))
        histogram = (
            needed_bias_histogram(scores, threshold, bias.astype(wide), is_real, num_bins)
            if num_bins
            else varying_like(jnp.zeros((moe.num_experts, 0), jnp.int32), load)
        )
        by_row = lambda array: array.reshape(*segment_ids.shape, -1)  # noqa: E731
        nothing = varying_like(jnp.zeros((), jnp.int32), load)
        balance = z = nothing.astype(wide)
        if router.balance_coefficient:
            scores = router_scores(logits, router.scoring)
            balance = load_balance_loss(by_row(scores), by_row(index), segment_ids, router.balance_over)
        if router.z_coefficient:
            z = z_loss(by_row(logits), segment_ids)
        return index, weight, RouterStatistics(load, histogram, nothing, nothing, balance, z)

    def _is_exchanged(self) -> bool:
        return lax.axis_size(MESH_AXES_OF_EXPERTS[self.model.moe.expert_axes]) > 1

    def _apply_experts(
        self, tokens: jax.Array, rows: jax.Array, index: jax.Array, weight: jax.Array, in_stack: InStack | None
    ) -> Exchanged:
        """`rows` [t, R], `index`, `weight` [t, A] -> this tensor shard's part of the weighted sum [t, R].

        And meanwhile the hidden values of the shared experts, of `tokens` [t, D].
        """
        moe, activation = self.model.moe, self.model.activation
        # Marked as varying before the exchange's rounds: gradients are summed over devices once, outside them.
        rows, weight = make_varying((rows, weight), (TENSOR,))
        # Rows of a whole exchange wait in the backward pass until the adapters have their gradients.
        rows, adapters = gradients_together((rows, self._expert_adapters(rows.dtype)))
        weights = {name: self._expert_weight(name, rows.dtype) for name in ("gate", "up", "down")}
        settings = {"activation": activation.kind, "beta": activation.beta, "linear_beta": activation.linear_beta}
        if not self._is_exchanged():
            nothing = varying_like(jnp.zeros((), jnp.int32), index)
            if moe.resident_experts:
                index = jnp.where(index >= 0, index % moe.resident_experts, -1)
            mixed = routed_experts(rows, index, weight, **weights, **settings, adapters=adapters)
            return Exchanged(mixed, nothing, nothing, self.shared.hidden(tokens) if moe.num_shared_experts else None)
        exchange = ExpertExchange(
            num_experts=moe.num_experts,
            capacity_factor=moe.capacity_factor,
            overflow=moe.overflow,
            transport=moe.transport,
            num_chunks=moe.exchange_chunks,
            node_devices=moe.node_members(lax.axis_size(TENSOR)),
            mesh_axes=MESH_AXES_OF_EXPERTS[moe.expert_axes],
        )

        def apply(experts: tuple, rows: jax.Array, expert: jax.Array) -> jax.Array:
            (trained, adapters), frozen = experts
            if isinstance(frozen, InStack):
                frozen = make_varying(frozen.take())
            return expert_mlp(rows, expert, **trained, **frozen, **settings, adapters=adapters)

        def shared_hidden() -> jax.Array | None:
            # Kept apart: XLA joins products of the same rows, and this one would delay the exchange, not hide it.
            return self.shared.hidden(lax.optimization_barrier(tokens)) if moe.num_shared_experts else None

        # One by one: rounds behind the first give `others` no gradients.
        trained = {name: weight for name, weight in weights.items() if self._is_trained(name)}
        frozen = {name: weight for name, weight in weights.items() if name not in trained}
        return exchange_experts(
            rows,
            index,
            weight,
            apply,
            exchange,
            trained=(trained, adapters),
            others=frozen,
            later_others=frozen if in_stack is None else self._where_they_rest(frozen, in_stack),
            meanwhile=shared_hidden,
        )

    def _where_they_rest(self, frozen: dict[str, Any], in_stack: InStack) -> dict[str, Any] | InStack:
        """The weights `frozen` in the stack of all layers, if they rest there as they are used.

        What a loop takes is an array of its own: all experts would be copied for rounds that hardly ever run.
        """
        resting = {
            name: jax.tree.map(
                lambda variable: variable.get_value(),
                in_stack.stack._expert_variable(name),
                is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
            )
            for name in frozen
        }
        pairs = zip(jax.tree.leaves(frozen), jax.tree.leaves(resting), strict=True)
        if all((used.shape, used.dtype) == (whole.shape[1:], whole.dtype) for used, whole in pairs):
            return InStack(resting, in_stack.number)
        return frozen
