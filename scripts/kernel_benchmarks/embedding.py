"""What XLA makes of the decoder's input rows, of norms and of gated activations: whether a kernel would pay.

Rows: token embeddings of 163,840 words at Kimi K3's width with projected features of pictures in their places, and the
gradients of both. Bytes are those that have to move: rows read once and written once.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.gated_activation.api import gated_activation

TOKENS, WIDTH, VOCABULARY, FEATURES = 16384, 7168, 163840, 4096


def rms_norm(inputs, scale):
    """As `mmjax.models.layers.rms_norm`."""
    wide = inputs.astype(jnp.float32)
    normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return normalised.astype(inputs.dtype) * jnp.broadcast_to(scale, inputs.shape).astype(inputs.dtype)


def input_rows(table, features, tokens, feature_index):
    """As `Decoder.embed` and `place_features` do it on one device."""
    rows = jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)
    is_feature = feature_index >= 0
    place = jnp.where(is_feature, feature_index, features.shape[0])
    placed = jnp.take(features, place, axis=0, mode="fill", fill_value=0)
    return jnp.where(is_feature[:, None], placed, rows)


def with_gradients(function, arrays, gradient, *others):
    result, transpose = jax.vjp(lambda *arrays: function(*arrays, *others), *arrays)
    return result, transpose(gradient)


def merge_and_project(patches, up, down, scale):
    """2x2 neighbours side by side, through the projector and its norm: [4 F, C] -> [F, D]."""
    merged = patches.reshape(-1, 4 * patches.shape[1])
    hidden = jax.nn.gelu(merged @ up, approximate=False)
    return rms_norm(hidden @ down, scale)


def run(only, median_seconds, report):
    def measure(case, function, arrays, flops, num_bytes):
        if only in case:
            compiled = jax.jit(function).lower(*arrays).compile()
            report(case, median_seconds(compiled, *arrays), flops, num_bytes, compiled)

    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    # Repeated: drawing all of it would take longer than everything else.
    table = jnp.tile(normal(next(keys), (1024, WIDTH)), (VOCABULARY // 1024, 1))
    features = normal(next(keys), (FEATURES, WIDTH))
    tokens = jax.random.randint(next(keys), (TOKENS,), 0, VOCABULARY)
    place = jnp.arange(TOKENS)
    feature_index = jnp.where((place >= 8) & (place < 8 + FEATURES), place - 8, -1)
    gradient, row = normal(next(keys), (TOKENS, WIDTH)), 2 * TOKENS * WIDTH
    measure("input rows", input_rows, (table, features, tokens, feature_index), 0, 2 * row)
    of_features = 2 * FEATURES * WIDTH

    def with_gradient_of_features(features, gradient, table, tokens, feature_index):
        rows_of = lambda features: input_rows(table, features, tokens, feature_index)  # noqa: E731
        return with_gradients(rows_of, (features,), gradient)

    def with_both_gradients(table, features, gradient, tokens, feature_index):
        return with_gradients(input_rows, (table, features), gradient, tokens, feature_index)

    others = tokens, feature_index
    measure(
        "input rows and gradient of features",
        with_gradient_of_features,
        (features, gradient, table, *others),
        0,
        2 * row + 2 * of_features,
    )
    measure(
        "input rows and gradients of table and features",
        with_both_gradients,
        (table, features, gradient, *others),
        0,
        3 * row + 2 * of_features + 2 * VOCABULARY * WIDTH,
    )
    patches, up = normal(next(keys), (4 * FEATURES, 1024)), normal(next(keys), (4096, 4096)) * jnp.bfloat16(1 / 64)
    down, scale = normal(next(keys), (4096, WIDTH)) * jnp.bfloat16(1 / 64), jnp.ones(WIDTH)
    flops = 2 * FEATURES * 4096 * (4096 + WIDTH)
    measure("merge, projector and its norm", merge_and_project, (patches, up, down, scale), flops, 0)
    measure("norm alone, of features", rms_norm, (features, scale), 0, 2 * of_features)
    measure("norm", rms_norm, (gradient, scale), 0, 2 * row)
    inputs = normal(next(keys), (TOKENS, WIDTH))
    measure(
        "norm and gradients",
        lambda inputs, scale, gradient: with_gradients(rms_norm, (inputs, scale), gradient),
        (inputs, scale, gradient),
        0,
        5 * row,
    )
    gate, up = normal(next(keys), (TOKENS, WIDTH)), normal(next(keys), (TOKENS, WIDTH))
    for kind in ("silu", "situ"):
        activation = partial(gated_activation, kind=kind)
        measure(kind, activation, (gate, up), 0, 3 * row)
        measure(
            f"{kind} and gradients",
            lambda gate, up, gradient, activation=activation: with_gradients(activation, (gate, up), gradient),
            (gate, up, gradient),
            0,
            6 * row,
        )
