"""Exchange of token rows with the devices of their experts, in bounded buffers: one contract, four transports."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from mmjax.axes import EXPERT
from mmjax.errors import ConfigurationError
from mmjax.parallel.conditions import add_rounds, in_order
from mmjax.parallel.expert_buffers import AllToAll, Buffers, ByNode, Chunk, Ragged, add_choices, place, take_rows
from mmjax.parallel.fsdp import varying_like

Apply = Callable[[Any, jax.Array, jax.Array], jax.Array]


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
    trained: Any = (),
    others: Any = (),
    later_others: Any = (),
    meanwhile: Callable[[], jax.Array | None] = lambda: None,
) -> Exchanged:
    """The weighted sum of what each token's experts make of its row, wherever they live. Inside `shard_map`.

        mixed[t] = sum_a weight[t, a] * apply(experts, rows[t], expert index[t, a])

    `rows` [t, R]; `index` [t, A] int32 counts experts over the whole mesh, -1 is sent nowhere and adds nothing;
    `weight` [t, A] in at least float32. `apply(experts, rows [n, R], local_expert [n]) -> [n, R]` works on one device's
    slice of the experts, the pair of `trained` and `others`, of which `trained` has gradients; it closes over no
    arrays, gives 0 for expert -1 and holds no collective. Rounds behind the first get `later_others` instead, if given.
    `trained` and `rows` should already vary over every mesh axis that its output varies on, so that gradients are
    summed over devices once, outside.

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
    later_others = later_others or others
    if lax.axis_size(exchange.mesh_axes) == 1:
        places = place(jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape), index >= 0, index.size)
        outputs = apply((trained, others), take_rows(rows, places), index.reshape(-1))
        nothing = varying_like(jnp.zeros((), jnp.int32), index)
        return Exchanged(add_choices(varying_like(outputs, weight), weight, places), nothing, nothing, meanwhile())
    if exchange.transport == "ring":
        return _pass_around(rows, index, weight, apply, exchange, trained, others, later_others)._replace(
            meanwhile=meanwhile()
        )

    def run_round(number: jax.Array, held: tuple, known: tuple) -> jax.Array:
        (rows, weight, trained), (index, others) = held, known
        buffers = _buffers(index, exchange)
        chunks = buffers.chunks(number, weight)
        ahead = [buffers.send_ahead(rows, chunk) for chunk in chunks]
        arrived = buffers.dispatch(ahead[0], chunks[0])
        return _work_on(buffers, chunks, arrived, ahead[1:], weight.dtype, partial(apply, (trained, others)))

    buffers = _buffers(index, exchange)
    chunks = buffers.chunks(0, weight)
    ahead = [buffers.send_ahead(rows, chunk) for chunk in chunks]
    arrived, later_rows, aside = buffers.dispatch(ahead[0], chunks[0]), rows, meanwhile()
    if aside is not None:
        # All else waits for it: left to choose, XLA keeps it for a time when the experts' work hides what travels.
        arrived, later_rows, aside = lax.optimization_barrier((arrived, rows, aside))
        # What comes from other nodes is on its way meanwhile too.
        of_others, aside = in_order(([array for array in ahead if array is not rows], aside))
        ahead = [rows, *of_others] if of_others else [later_rows] * len(ahead)
    mixed = _work_on(buffers, chunks, arrived, ahead[1:], weight.dtype, partial(apply, (trained, others)))
    if exchange.overflow == "drop":
        return Exchanged(mixed, varying_like(jnp.ones((), jnp.int32), index), buffers.num_beyond, aside)
    if buffers.max_rounds > 1:
        mixed = add_rounds(mixed, run_round, buffers.num_rounds, (rows, weight, trained), (index, later_others))
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
    apply: Callable[[jax.Array, jax.Array], jax.Array],
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


def _pass_around(
    rows: jax.Array,
    index: jax.Array,
    weight: jax.Array,
    apply: Apply,
    exchange: ExpertExchange,
    trained: Any,
    others: Any,
    later_others: Any,
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

    def run_round(number: jax.Array | int, held: tuple, known: tuple) -> jax.Array:
        (rows, weight, trained), (expert, rank, is_own, others) = held, known
        slot = rank - number * capacity
        places = place(slot, is_own & (slot >= 0) & (slot < capacity), capacity)
        local_expert = expert.reshape(-1).at[places.choice].get(mode="fill", fill_value=-1)
        outputs = apply((trained, others), take_rows(rows, places), local_expert)
        return add_choices(varying_like(outputs, weight), weight, places)

    def own_part(passed: tuple[jax.Array, jax.Array, jax.Array]) -> Exchanged:
        rows, index, weight = passed
        expert = index - first_expert
        is_own = (index >= 0) & (expert >= 0) & (expert < local_experts)
        rank = (jnp.cumsum(is_own.reshape(-1), dtype=jnp.int32) - 1).reshape(index.shape)
        count = jnp.sum(is_own, dtype=jnp.int32)
        num_rounds = jnp.clip(-(-count // capacity), 1, max_rounds)
        held, known = (rows, weight, trained), (expert, rank, is_own)
        mixed = run_round(0, held, (*known, others))
        if max_rounds > 1:
            # No device waits for another's further rounds: they hold no exchange.
            mixed = add_rounds(mixed, run_round, num_rounds, held, (*known, later_others))
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
