"""Routed experts: the MLP at several shapes, one grouped product, adapters, and a block of Kimi K3 in MXFP4."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation.api import gated_activation
from pallas_kernels.moe import copying, hopper, mxfp4
from pallas_kernels.moe.api import routed_experts, select_experts, weigh_experts
from pallas_kernels.moe.contraction import contract_rows
from pallas_kernels.moe.tiles import BLOCK, Counter, Shape, cut_tiles

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
    def measure(case, function, arrays, flops, num_bytes, **compiler_options):
        if only in case:
            compiled = jax.jit(function, compiler_options=compiler_options).lower(*arrays).compile()
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


def draw_packed(key, experts, inputs, outputs):
    """A packed weight of random codes whose values are of the order of `inputs` to the power -1/2."""
    codes = jax.random.bits(key, (experts, outputs, inputs // 2), jnp.uint8)
    scale = 127 + round(np.log2(inputs**-0.5 / 2.93))
    return {"codes": codes, "scales": jnp.full((experts, outputs, inputs // 32), scale, jnp.uint8)}


def run_product(measure):
    """One product of about 32768 rows with 112 experts' [3584, 6144] weights, forward and both gradients."""
    experts, depth, columns = 112, 3584, 6144
    counts = 292 + np.random.default_rng(0).integers(-40, 41, experts)
    num_blocks = jnp.asarray(-(-counts // BLOCK), jnp.int32)
    slots = BLOCK * int(num_blocks.sum())
    keys = jax.random.split(jax.random.key(1), 4)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    rows, weight = normal(keys[0], (slots, depth)), normal(keys[1], (experts, depth, columns)) * depth**-0.5
    gradient, shape, packed = normal(keys[2], (slots, columns)), Shape(), draw_packed(keys[3], experts, depth, columns)
    tiles = cut_tiles(num_blocks, slots // BLOCK, shape.warpgroups)
    flops = 2 * int(counts.sum()) * depth * columns
    activations, elements = 2 * int(counts.sum()) * (depth + columns), experts * depth * columns

    def count(place):
        return Counter(jnp.minimum(tiles.num_tiles[0], 0) + jnp.zeros(3, jnp.int32), place)

    def product(rows, weight, *, by_rows):
        # Packed weights are [E, out, in].
        is_packed = isinstance(weight, dict)
        weight = copying.arrange(mxfp4.PackedWeight(**weight)) if is_packed else weight
        transposed, place = by_rows != is_packed, int(by_rows)
        return hopper._multiply([(rows, weight)], tiles, count(place), shape, transposed=transposed, name="product")

    def by_weight(rows, gradient):
        first = jnp.cumsum(num_blocks) - num_blocks
        return contract_rows(rows, [gradient], first, num_blocks, counter=count(2), shape=shape, name="by_weight")[0]

    name = "rows 32720 E112 K3584 N6144"
    for kind, array, num_bytes in (("", weight, 2 * elements), (" MXFP4", packed, elements * 17 // 32)):
        num_bytes += activations
        measure(f"product{kind} {name}", partial(product, by_rows=False), (rows, array), flops, num_bytes)
        measure(f"product{kind} by rows {name}", partial(product, by_rows=True), (gradient, array), flops, num_bytes)
    measure(f"product by weight {name}", by_weight, (rows, gradient), flops, activations + 2 * elements)


def run_block(measure):
    """The step of a block of Kimi K3 on one of 64 devices: 14 of 896 experts, as many choices as 4096 tokens make.

    The choices that other devices' tokens make of these experts are played by this device's of all others. Weights are
    frozen; gradients are those of the tokens and, in the last case, of adapters of rank 16.
    """
    tokens, width, latent, hidden, shared, experts, total, choices = 4096, 7168, 3584, 3072, 6144, 14, 896, 16
    keys = iter(jax.random.split(jax.random.key(2), 20))
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)

    def matrix(*shape):
        return normal(next(keys), shape) * jnp.bfloat16(shape[-2] ** -0.5)

    inputs, gradient = normal(next(keys), (tokens, width)), normal(next(keys), (tokens, width))
    router = jax.random.normal(next(keys), (width, total)) * width**-0.5
    outer = matrix(width, latent), matrix(latent, width), matrix(width, shared), matrix(width, shared)
    outer = *outer, matrix(shared, width)
    shapes = {"gate": (latent, hidden), "up": (latent, hidden), "down": (hidden, latent)}
    packed = [draw_packed(next(keys), experts, *shape) for shape in shapes.values()]
    dense = jax.jit(lambda packed: [jnp.swapaxes(mxfp4.dequantize(w, jnp.bfloat16), 1, 2) for w in packed])(packed)
    factors = {name: (matrix(experts, i, 16), matrix(experts, 16, o)) for name, (i, o) in shapes.items()}

    def block(inputs, factors, weights, router, outer):
        down, up, shared_gate, shared_up, shared_down = outer
        logits = jnp.einsum("td,de->te", inputs.astype(jnp.float32), router)
        index = select_experts(logits, jnp.zeros(total), experts_per_token=choices, scoring="sigmoid").index
        weight = weigh_experts(logits, index, scoring="sigmoid", renormalise=True, scale=1.0)
        mixed = forward(inputs @ down, index % experts, weight, *weights, adapters=factors, activation="situ")
        mixed = mixed * jax.lax.rsqrt(jnp.mean(mixed**2, axis=1, keepdims=True) + 1e-5)
        of_shared = gated_activation(inputs @ shared_gate, inputs @ shared_up, kind="situ")
        return mixed.astype(jnp.bfloat16) @ up + of_shared.astype(jnp.bfloat16) @ shared_down

    def step(inputs, factors, weights, router, outer, gradient):
        outputs, transpose = jax.vjp(partial(block, weights=weights, router=router, outer=outer), inputs, factors)
        return outputs, transpose(gradient)

    of_tokens = width * (2 * latent + 3 * shared + total)
    flops = 4 * tokens * (of_tokens + 3 * choices * latent * hidden)
    for name, weights, adapters in (
        ("bfloat16 experts", dense, {}),
        ("MXFP4 experts", packed, {}),
        ("MXFP4 experts, adapters r16", packed, factors),
    ):
        arrays = inputs, adapters, weights, router, outer, gradient
        # Dense products by cuBLAS, which is quick to tune and, untuned, near its best.
        measure(f"block, {name}", step, arrays, flops, 0, xla_gpu_enable_triton_gemm=False)
