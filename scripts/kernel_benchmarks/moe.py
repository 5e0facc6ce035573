"""Routed experts: the whole MLP at several shapes, one grouped product, adapters, and a block of Kimi K3 in MXFP4."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation.api import gated_activation
from pallas_kernels.moe import hopper, mxfp4
from pallas_kernels.moe.api import routed_experts
from pallas_kernels.moe.grouped import BLOCK, Counter, Shape, contract_rows, cut_tiles

MLPS = {  # tokens, experts, experts per token, width, hidden width, activation
    "T16384 E896 top16 D1024 I512": (16384, 896, 16, 1024, 512, "silu"),
    "T16384 E896 top16 D1024 I512 situ": (16384, 896, 16, 1024, 512, "situ"),
    "T16384 E64 top6 D2048 I1408": (16384, 64, 6, 2048, 1408, "silu"),
    "T16384 E128 top8 D2048 I768": (16384, 128, 8, 2048, 768, "silu"),
}


def draw_mlp(tokens, experts, choices, width, hidden, skew=0.0, seed=0):
    """(rows, index, weight, gate, up, down, gradient): logits fall with the logarithm of the expert's number."""
    keys = jax.random.split(jax.random.key(seed), 6)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    logits = jax.random.normal(keys[0], (tokens, experts)) - skew * jnp.log1p(jnp.arange(experts, dtype=jnp.float32))
    largest, index = jax.lax.top_k(logits, choices)
    gate, up = (normal(key, (experts, width, hidden)) * width**-0.5 for key in keys[1:3])
    down = normal(keys[3], (experts, hidden, width)) * hidden**-0.5
    gradient = jax.random.normal(keys[5], (tokens, width), jnp.float32)
    return normal(keys[4], (tokens, width)), index, jax.nn.softmax(largest), gate, up, down, gradient


def forward(rows, index, weight, gate, up, down, adapters=None, *, activation):
    return routed_experts(
        rows, index, weight, gate, up, down, activation=activation, adapters=adapters, implementation="pallas"
    )


def step(rows, index, weight, gate, up, down, gradient, *, activation):
    outputs, transpose = jax.vjp(
        lambda *arrays: forward(arrays[0], index, *arrays[1:], activation=activation), rows, weight, gate, up, down
    )
    return outputs, transpose(gradient)


def step_of_adapters(rows, index, weight, gate, up, down, gradient, adapters, *, activation):
    outputs, transpose = jax.vjp(
        lambda rows, weight, adapters: forward(rows, index, weight, gate, up, down, adapters, activation=activation),
        rows,
        weight,
        adapters,
    )
    return outputs, transpose(gradient)


def step_by_definition(rows, index, weight, gate, up, down, gradient, *, activation):
    """The same in float32, one expert after the other over all rows."""

    def apply(rows, weight, gate, up, down):
        share = jnp.zeros((rows.shape[0], gate.shape[0])).at[jnp.arange(rows.shape[0])[:, None], index].add(weight)

        def add_expert(total, expert):
            share, gate, up, down = expert
            hidden = gated_activation(rows @ gate, rows @ up, kind=activation)
            return total + share[:, None] * (hidden @ down), None

        return jax.lax.scan(add_expert, jnp.zeros_like(rows), (share.T, gate, up, down))[0]

    wide = [array.astype(jnp.float32) for array in (rows, weight, gate, up, down)]
    with jax.default_matmul_precision("highest"):
        outputs, transpose = jax.vjp(apply, *wide)
        return outputs, transpose(gradient)


def check(activation, skew):
    """Print the relative error of the result and of each gradient, the worst expert's for weights."""
    arrays = draw_mlp(1024, 64, 8, 1024, 512, skew, seed=1)
    arrays = (*arrays[:-1], arrays[-1].astype(jnp.bfloat16).astype(jnp.float32))
    got = jax.tree.leaves(jax.jit(partial(step, activation=activation))(*arrays))
    want = jax.tree.leaves(jax.jit(partial(step_by_definition, activation=activation))(*arrays))
    errors = []
    for result, expected in zip(got, want, strict=True):
        result, expected = (np.asarray(array, np.float64) for array in (result, expected))
        axes = (1, 2) if result.ndim == 3 else None
        norm = partial(np.linalg.norm, axis=axes)
        scale = norm(expected)
        errors.append(np.max(np.where(scale > 0, norm(result - expected) / np.where(scale > 0, scale, 1), 0)))
    print(
        f"check {activation} skew {skew}: relative errors {', '.join(f'{error:.1e}' for error in errors)}", flush=True
    )
    assert max(errors) < 6e-3


def run(only, median_seconds, report):
    def measure(case, function, arrays, flops, num_bytes):
        if only in case:
            compiled = jax.jit(function).lower(*arrays).compile()
            report(case, median_seconds(compiled, *arrays), flops, num_bytes, compiled)

    if not only:
        check("silu", 0.0)
        check("situ", 1.0)
    for name, (tokens, experts, choices, width, hidden, activation) in MLPS.items():
        if only and not (only in f"forward {name}" or only in f"step {name}"):
            continue
        arrays = draw_mlp(tokens, experts, choices, width, hidden)
        pairs = tokens * choices
        flops, weights = 6 * pairs * width * hidden, 6 * experts * width * hidden
        once = weights + 2 * (2 * tokens * width + 2 * pairs * width + 4 * pairs * hidden)
        again = 2 * weights + 2 * (3 * tokens * width + 4 * pairs * width + 8 * pairs * hidden)
        measure(f"forward {name}", partial(forward, activation=activation), arrays[:-1], flops, once)
        measure(f"step {name}", partial(step, activation=activation), arrays, 3 * flops, once + again)
    if only in "adapters":
        arrays = draw_mlp(16384, 896, 16, 1024, 512)
        factors = {
            name: tuple(jnp.full(s, 0.01, jnp.bfloat16) for s in ((896, i, 16), (896, 16, o)))
            for name, i, o in (("gate", 1024, 512), ("up", 1024, 512), ("down", 512, 1024))
        }
        flops = 12 * 16384 * 16 * 1024 * 512
        measure(
            "step of adapters r16, T16384 E896",
            partial(step_of_adapters, activation="situ"),
            (*arrays, factors),
            flops,
            0,
        )
    if only in "product":
        run_product(measure)
    if only in "block":
        run_block(measure)


def run_product(measure):
    """One product of about 32768 rows with 112 experts' [3584, 6144] weights, forward and both gradients."""
    experts, depth, columns = 112, 3584, 6144
    counts = 292 + np.random.default_rng(0).integers(-40, 41, experts)
    num_blocks = jnp.asarray(-(-counts // BLOCK), jnp.int32)
    slots = BLOCK * int(num_blocks.sum())
    keys = jax.random.split(jax.random.key(1), 3)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    rows, weight = normal(keys[0], (slots, depth)), normal(keys[1], (experts, depth, columns)) * depth**-0.5
    gradient, shape = normal(keys[2], (slots, columns)), Shape()
    tiles = cut_tiles(num_blocks, slots // BLOCK, shape.warpgroups)
    flops = 2 * int(counts.sum()) * depth * columns
    num_bytes = 2 * (int(counts.sum()) * (depth + columns) + experts * depth * columns)

    def product(rows, weight, transposed, place):
        counter = Counter(jnp.minimum(tiles.num_tiles[0], 0) + jnp.zeros(3, jnp.int32), place)
        return hopper._multiply([(rows, weight)], tiles, counter, shape, transposed=transposed, name="product")

    def by_weight(rows, gradient):
        counter = Counter(jnp.minimum(tiles.num_tiles[0], 0) + jnp.zeros(3, jnp.int32), 2)
        first = jnp.cumsum(num_blocks) - num_blocks
        return contract_rows(rows, [gradient], first, num_blocks, counter=counter, shape=shape, name="by_weight")[0]

    name = "rows 32720 E112 K3584 N6144"
    measure(f"product {name}", partial(product, transposed=False, place=0), (rows, weight), flops, num_bytes)
    measure(f"product by rows {name}", partial(product, transposed=True, place=1), (gradient, weight), flops, num_bytes)
    measure(f"product by weight {name}", by_weight, (rows, gradient), flops, num_bytes)


def run_block(measure):
    """Kimi K3's routed experts on one of 64 devices: 14 of 896 experts, 16384 choices."""
    experts, width, hidden, choices = 14, 3584, 3072, 16384
    keys = jax.random.split(jax.random.key(2), 8)
    index = jax.random.randint(keys[0], (choices, 1), 0, experts, jnp.int32)
    rows = jax.random.normal(keys[1], (choices, width), jnp.bfloat16)
    gradient = jax.random.normal(keys[2], (choices, width), jnp.float32)
    weight = jnp.ones((choices, 1))

    def pack(key, inputs, outputs):
        codes = jax.random.randint(key, (experts, outputs, inputs // 2), 0, 256, jnp.int32).astype(jnp.uint8)
        return {"codes": codes, "scales": jnp.full((experts, outputs, inputs // 32), 119, jnp.uint8)}

    packed = pack(keys[3], width, hidden), pack(keys[4], width, hidden), pack(keys[5], hidden, width)

    def unpack(array):
        return jnp.swapaxes(mxfp4.dequantize(array, jnp.bfloat16), 1, 2)

    def block(rows, weight, gradient, *weights):
        dense = [unpack(array) if isinstance(array, dict) else array for array in weights]
        outputs, transpose = jax.vjp(
            lambda rows, weight: forward(rows, index, weight, *dense, activation="situ"), rows, weight
        )
        return outputs, transpose(gradient)

    flops = 12 * choices * width * hidden
    measure(
        "block, bfloat16 weights",
        block,
        (rows, weight, gradient, *jax.jit(lambda w: [unpack(a) for a in w])(packed)),
        flops,
        0,
    )
    measure("block, MXFP4 weights", block, (rows, weight, gradient, *packed), flops, 0)
