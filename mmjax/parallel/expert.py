"""Exchange of token rows with the devices of their experts, in bounded buffers: one contract, four transports."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from mmjax.axes import EXPERT
from mmjax.errors import ConfigurationError
from mmjax.parallel.conditions import in_order
from mmjax.parallel.expert_buffers import AllToAll, Buffers, ByNode, Chunk, Ragged, add_choices, place, take_rows
from mmjax.parallel.fsdp import varying_like

Apply = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class ExpertExchange:
    """How rows travel: `exchange_experts` says what the settings do."""

    num_experts: int
    """Over the whole mesh; each device holds an equal slice, in order."""
    capacity_factor: float
    overflow: Literal["rounds", "drop"] = "rounds"
    transport: Literal["all_to_all", "by_node", "ring", "ragged"] = "all_to_all"
    num_chunks: int = 1
    node_devices: int = 1
    """Devices of a node that lie next to each other along `mesh_axes`; only `by_node` asks."""
    mesh_axes: tuple[str, ...] = (EXPERT,)
    """The experts' slices lie over these, the last one fastest."""


def check_transport(transport: str, mesh_axes: tuple[str, ...], mesh: Mesh) -> None:
    """
    Raises:
      ConfigurationError: the mesh's devices cannot exchange so.
    """
    platform = mesh.devices.flat[0].platform
    if transport == "ragged" and platform == "cpu" and math.prod(mesh.shape[axis] for axis in mesh_axes) > 1:
        raise ConfigurationError(
            "model.moe.transport",
            found="'ragged' on CPU devices",
            expected="GPUs, whose XLA has an exchange of rows without gaps",
            remedy="give all_to_all or ring",
        )


class Exchanged(NamedTuple):
    """What `exchange_experts` gives."""

    mixed: jax.Array
    """[t, R] in the dtype of the weights."""
    num_rounds: jax.Array
    """int32: rounds that this device went through; 0 where nothing is exchanged."""
    num_dropped: jax.Array
    """int32: choices left out; each is counted on one device."""
    meanwhile: jax.Array | None = None


def exchange_experts(
    rows: jax.Array,
    index: jax.Array,
    weight: jax.Array,
    apply: Apply,
    exchange: ExpertExchange,
    meanwhile: Callable[[], jax.Array | None] = lambda: None,
) -> Exchanged:
    """The weighted sum of what each token's experts make of its row, wherever they live. Inside `shard_map`.

        mixed[t] = sum_a weight[t, a] * apply(rows[t], expert index[t, a])

    `rows` [t, R]; `index` [t, A] int32 counts experts over the whole mesh, -1 is sent nowhere and adds nothing;
    `weight` [t, A] in at least float32. `apply(rows [n, R], local_expert [n]) -> [n, R]` works on one device's slice of
    the experts, must give 0 for expert -1 and hold no collective: what it closes over, and `rows`, should already vary
    over every mesh axis that its output varies on, so that gradients are summed over devices once, outside.

    On n devices, f = capacity_factor bounds what is sent or computed at a time:

        all_to_all   each pair of devices exchanges buffers of ceil(f * t * A / n) rows
        by_node      the same buffers, but from node to node all t rows pass once, and the sums of their results in the
                     dtype of `rows`; the node's devices fill and empty them for each other
        ragged       a device takes in up to ceil(f * t * A) rows, from whomever; only chosen rows travel
        ring         all rows, and the sums of their results, pass from device to device; each takes out what its own
                     experts work on, ceil(f * t * A / n) rows at a time

    The rest follows in further rounds, as many as the fullest device needs ("rounds"), or is left out ("drop": the last
    tokens' first; with `ragged`, the last devices' first). `all_to_all` and `ragged` send each round in `num_chunks`
    equal parts, a part on its way while the experts work on the one before it; what comes from each node, and a ring's
    steps, are such parts already. On one device nothing is sent and nothing dropped. Weights travel along: but for a
    ring, results are weighted where the experts are.

    `meanwhile()`, which may give values that vary as `rows` do, is computed while the first part is on its way.
    """
    rows = varying_like(rows, index)
    weight = varying_like(weight, rows)
    if lax.axis_size(exchange.mesh_axes) == 1:
        places = place(jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape), index >= 0, index.size)
        outputs = apply(take_rows(rows, places), index.reshape(-1))
        nothing = varying_like(jnp.zeros((), jnp.int32), index)
        return Exchanged(add_choices(varying_like(outputs, weight), weight, places), nothing, nothing, meanwhile())
    if exchange.transport == "ring":
        return _pass_around(rows, index, weight, apply, exchange)._replace(meanwhile=meanwhile())
    buffers = _buffers(index, exchange)

    def run_round(number: jax.Array) -> jax.Array:
        chunks = buffers.chunks(number, weight)
        ahead = [buffers.send_ahead(rows, chunk) for chunk in chunks]
        return _work_on(buffers, chunks, buffers.dispatch(ahead[0], chunks[0]), ahead[1:], weight.dtype, apply)

    chunks = buffers.chunks(0, weight)
    ahead = [buffers.send_ahead(rows, chunk) for chunk in chunks]
    arrived, later_rows, aside = buffers.dispatch(ahead[0], chunks[0]), rows, meanwhile()
    if aside is not None:
        # All else waits for it: left to choose, XLA keeps it for a time when the experts' work hides what travels.
        arrived, later_rows, aside = lax.optimization_barrier((arrived, rows, aside))
        # What comes from other nodes is on its way meanwhile too.
        of_others, aside = in_order(([array for array in ahead if array is not rows], aside))
        ahead = [rows, *of_others] if of_others else [later_rows] * len(ahead)
    mixed = _work_on(buffers, chunks, arrived, ahead[1:], weight.dtype, apply)
    if exchange.overflow == "drop":
        return Exchanged(mixed, varying_like(jnp.ones((), jnp.int32), index), buffers.num_beyond, aside)
    mixed = _add_rounds(mixed, run_round, buffers.num_rounds, buffers.max_rounds)
    num_rounds = varying_like(buffers.num_rounds, index)
    return Exchanged(mixed, num_rounds, varying_like(jnp.zeros((), jnp.int32), index), aside)


def _buffers(index: jax.Array, exchange: ExpertExchange) -> Buffers:
    settings = {
        "num_experts": exchange.num_experts,
        "capacity_factor": exchange.capacity_factor,
        "num_chunks": exchange.num_chunks,
        "mesh_axes": exchange.mesh_axes,
    }
    node_devices = math.gcd(exchange.node_devices, lax.axis_size(exchange.mesh_axes))
    if exchange.transport == "by_node" and node_devices > 1:
        return ByNode(index, node_devices=node_devices, **settings)
    return (Ragged if exchange.transport == "ragged" else AllToAll)(index, **settings)


def _work_on(
    buffers: Buffers,
    chunks: list[Chunk],
    arrived: jax.Array,
    ahead: list[jax.Array],
    dtype: jax.typing.DTypeLike,
    apply: Apply,
) -> jax.Array:
    """What a round adds [t, R]. Its first chunk has `arrived`; each other is sent before the work on the one before."""
    total: jax.Array | None = None
    following = arrived
    for number, chunk in enumerate(chunks):
        arrived = following
        if number + 1 < len(chunks):
            following = buffers.dispatch(ahead[number], chunks[number + 1])
        # Weighted here, so that the weights' gradient needs no result back at its token.
        outputs = varying_like(apply(arrived, chunk.expert), chunk.weight)
        weighted = (outputs.astype(dtype) * chunk.weight[:, None]).astype(outputs.dtype)
        part = buffers.combine(weighted, dtype, chunk)
        total = part if total is None else total + part
    assert total is not None
    return total


def _add_rounds(
    total: jax.Array, run_round: Callable[[jax.Array], jax.Array], num_rounds: jax.Array, max_rounds: int
) -> jax.Array:
    """`total`, which the first round gave, and what the others of `num_rounds` rounds add."""
    if max_rounds == 1:
        return total

    def nothing(*_) -> jax.Array:
        return varying_like(jnp.zeros(total.shape, total.dtype), total)

    def step(further: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        run = jax.checkpoint(
            lambda number: lax.cond(number < num_rounds, run_round, nothing, number), prevent_cse=False
        )
        return further + run(number), None

    def scan_rounds() -> jax.Array:
        return lax.scan(step, nothing(), jnp.arange(1, max_rounds, dtype=jnp.int32))[0]

    # Only inputs are kept for the backward pass, not a buffer for each round that might have been needed.
    return total + jax.checkpoint(lambda: lax.cond(num_rounds > 1, scan_rounds, nothing))()


def _pass_around(
    rows: jax.Array, index: jax.Array, weight: jax.Array, apply: Apply, exchange: ExpertExchange
) -> Exchanged:
    """The ring: in step s, device d has the rows of device d - s and adds its experts' part to their sum."""
    num_devices = lax.axis_size(exchange.mesh_axes)
    local_experts = exchange.num_experts // num_devices
    first_expert = lax.axis_index(exchange.mesh_axes) * local_experts
    capacity = min(index.size, math.ceil(exchange.capacity_factor * index.size / num_devices))
    max_rounds = 1 if exchange.overflow == "drop" else -(-index.size // capacity)

    def pass_on(arrays):
        to_next = [(device, (device + 1) % num_devices) for device in range(num_devices)]
        return jax.tree.map(lambda array: lax.ppermute(array, exchange.mesh_axes, to_next), arrays)

    def own_part(held: tuple[jax.Array, jax.Array, jax.Array]) -> Exchanged:
        rows, index, weight = held
        expert = index - first_expert
        is_own = (index >= 0) & (expert >= 0) & (expert < local_experts)
        rank = (jnp.cumsum(is_own.reshape(-1), dtype=jnp.int32) - 1).reshape(index.shape)
        count = jnp.sum(is_own, dtype=jnp.int32)

        def run_round(number: jax.Array | int) -> jax.Array:
            slot = rank - number * capacity
            places = place(slot, is_own & (slot >= 0) & (slot < capacity), capacity)
            local_expert = expert.reshape(-1).at[places.choice].get(mode="fill", fill_value=-1)
            outputs = apply(take_rows(rows, places), local_expert)
            return add_choices(varying_like(outputs, weight), weight, places)

        num_rounds = jnp.clip(-(-count // capacity), 1, max_rounds)
        # No device waits for another's further rounds: they hold no exchange.
        mixed = _add_rounds(run_round(0), run_round, num_rounds, max_rounds)
        return Exchanged(mixed, num_rounds, jnp.maximum(count - max_rounds * capacity, 0))

    def step(carry, _):
        held, total = carry
        # Both are on their way while the experts work.
        following, total_of_held = pass_on((held, total.mixed))
        part = jax.checkpoint(own_part, prevent_cse=False)(held)
        return (
            following,
            Exchanged(
                total_of_held + part.mixed,
                jnp.maximum(total.num_rounds, part.num_rounds),
                total.num_dropped + part.num_dropped,
            ),
        ), None

    held = (rows, index, weight)
    following = pass_on(held)
    (_, total), _ = lax.scan(step, (following, own_part(held)), length=num_devices - 1)
    return total._replace(mixed=pass_on(total.mixed))
