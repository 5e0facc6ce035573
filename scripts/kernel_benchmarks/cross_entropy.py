"""Cross-entropy of a head with 163,840 words: the head trained or frozen, chunks of several sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cross_entropy import reference
from pallas_kernels.cross_entropy.api import cross_entropy, cross_entropy_and_gradients

TOKENS, WIDTH, VOCABULARY = 16384, 4096, 163840
CASES = {  # head's gradient or None if it is frozen, dtype in which logits are held, tokens of a chunk
    "trained, float32 gradient, bfloat16 logits": (jnp.float32, jnp.bfloat16, 2048),
    "trained, float32 gradient, float32 logits": (jnp.float32, jnp.float32, 1024),
    "trained, bfloat16 gradient, bfloat16 logits": (jnp.bfloat16, jnp.bfloat16, 512),
    "trained, bfloat16 gradient and logits, larger chunks": (jnp.bfloat16, jnp.bfloat16, 4096),
    "frozen, bfloat16 logits": (None, jnp.bfloat16, 2048),
    "frozen, float32 logits": (None, jnp.float32, 1024),
}


def draw(tokens, width, vocabulary, seed=0):
    """(hidden, head, targets, weights) whose logits have a deviation of 1."""
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (width, vocabulary), jnp.bfloat16) * jnp.bfloat16(width**-0.5)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    return hidden, head, targets, jnp.full((tokens,), 1 / tokens, jnp.float32)


def step(hidden, head, targets, weights, *, gradient_dtype, logits_dtype, chunk_tokens, scale=1.0):
    return cross_entropy_and_gradients(
        hidden * jnp.bfloat16(scale),
        head,
        targets,
        weights,
        chunk_tokens=chunk_tokens,
        is_head_trained=gradient_dtype is not None,
        head_gradient_dtype=gradient_dtype,
        logits_dtype=logits_dtype,
        implementation="pallas",
    )


def check(name, gradient_dtype, logits_dtype, scale):
    """Print errors relative to float64 of the loss and of both gradients; logits deviate by about `scale`."""
    arrays = draw(600, 512, 5000, seed=1)
    options = {"gradient_dtype": gradient_dtype, "logits_dtype": logits_dtype, "chunk_tokens": 256, "scale": scale}
    got = jax.tree.leaves(jax.jit(partial(step, **options))(*arrays))
    with jax.enable_x64(True):
        hidden, head, targets, weights = (np.asarray(array) for array in arrays)
        hidden = np.asarray(hidden * jnp.bfloat16(scale), np.float64)
        loss_of = lambda hidden, head: reference.cross_entropy(hidden, head, targets, weights)  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_of, argnums=(0, 1))(hidden, np.asarray(head, np.float64))
    errors = [
        np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other)) / np.linalg.norm(np.asarray(other))
        for one, other in zip(got, (loss, *gradients), strict=False)
    ]
    print(f"check {name}, logits of {scale}: errors {', '.join(f'{error:.1e}' for error in errors)}", flush=True)
    assert max(errors) < 2e-2


def run(only, median_seconds, report):
    for name, (gradient_dtype, logits_dtype, _) in CASES.items():
        if only in name:
            for scale in (1.0, 8.0):
                check(name, gradient_dtype, logits_dtype, scale)
    arrays = draw(TOKENS, WIDTH, VOCABULARY)
    product = 2 * TOKENS * WIDTH * VOCABULARY
    for name, (gradient_dtype, logits_dtype, chunk_tokens) in CASES.items():
        if only not in name:
            continue
        options = {"gradient_dtype": gradient_dtype, "logits_dtype": logits_dtype, "chunk_tokens": chunk_tokens}
        # Which library of matrix products is taken is not left to a trial.
        compiled = (
            jax.jit(partial(step, **options), compiler_options={"xla_gpu_enable_triton_gemm": False})
            .lower(*arrays)
            .compile()
        )
        num_products = 2 if gradient_dtype is None else 3
        seconds = median_seconds(compiled, *arrays, repeats=3)
        report(f"{name}, {chunk_tokens}", seconds, num_products * product, 0, compiled)
    if only in "loss alone":
        loss = partial(cross_entropy, chunk_tokens=2048, logits_dtype=jnp.bfloat16, implementation="pallas")
        compiled = jax.jit(loss, compiler_options={"xla_gpu_enable_triton_gemm": False}).lower(*arrays).compile()
        report("loss alone, 2048", median_seconds(compiled, *arrays, repeats=3), product, 0, compiled)
