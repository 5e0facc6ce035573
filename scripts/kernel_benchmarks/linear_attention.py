"""Delta rule: Kimi Delta Attention and Gated DeltaNet, one long row and packed documents, each kernel by itself."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from delta_rule_cases import WIDTH, WITH_PEERS

from pallas_kernels.linear_attention import reference
from pallas_kernels.linear_attention.api import delta_rule
from pallas_kernels.linear_attention.gates import DecayGate

CASES = {  # as `WITH_PEERS`
    **WITH_PEERS,
    "KDA T32768 H32 unbounded decay": (32768, 32, 32, True, "unbounded", 32768),
    "KDA T32768 H32 bounded gate": (32768, 32, 32, True, "bounded gate", 32768),
    "KDA T32768 H32 bounded gate in front": (32768, 32, 32, True, "bounded gate in front", 32768),
    "KDA T32768 H32 softplus gate": (32768, 32, 32, True, "softplus gate", 32768),
    "KDA T32768 H32 softplus gate in front": (32768, 32, 32, True, "softplus gate in front", 32768),
    "GDN T32768 H32 softplus gate": (32768, 32, 32, False, "softplus gate", 32768),
    "KDA T32768 H4 strong decay": (32768, 4, 4, True, "strong", 32768),
    "GDN T32768 H4 slow decay": (32768, 4, 4, False, "slow", 32768),
    **{f"KDA T{2**power} H32 strong decay": (2**power, 32, 32, True, "strong", 2**power) for power in range(12, 21)},
}
CHUNK = 64
BLOCK = 256
DRAWN = 2**16
"""Longer rows repeat this many tokens."""
LONGEST_STEP = 2**19
"""What fits the memory of one H200."""
RESULTS = ("output", "state", "query", "key", "value", "log_decay", "beta", "initial_state")
OF_GATE = ("raw", "log_rate", "bias")


def draw(tokens, heads, key_heads, by_channel, decay, document, seed=0):
    """(query, key, value, log decay, beta, segments, output gradient, initial state).

    Of a decay by a gate its input, rate and bias are in the place of the log decay.
    """
    if tokens > DRAWN:
        drawn = draw(DRAWN, heads, key_heads, by_channel, decay, DRAWN, seed)
        segments = jnp.arange(tokens, dtype=jnp.int32)[None] // document + 1
        query, key, value, log_decay, beta, gradient = (
            jnp.tile(array, (1, tokens // DRAWN, *(1,) * (array.ndim - 2))) for array in (*drawn[:5], drawn[6])
        )
        return query, key, value, log_decay, beta, segments, gradient, drawn[7]
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    def unit(array):
        wide = array.astype(jnp.float32)
        return (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(array.dtype)

    query, key = (unit(normal(1, tokens, key_heads, WIDTH)) for _ in range(2))
    raw = normal(1, tokens, heads, *([WIDTH] if by_channel else []), dtype=jnp.float32)
    match decay:
        case "strong":  # -2.5 a token in the mean, at least -5
            log_decay = -5 * jax.nn.sigmoid(raw)
        case "slow":  # decays by 0.9 to 0.999
            log_decay = -jnp.minimum(jnp.exp(-4.6 + 1.1 * raw), 1)
        case "unbounded":  # by up to e^-100 at once
            log_decay = -jnp.exp(2 * raw)
        case _:  # mostly between 0 and -1.5 by a softplus, within the bounds by the other gate
            bias = jnp.linspace(-1, 1, raw[0, 0].size).reshape(raw.shape[2:])
            log_decay = (raw - 1).astype(jnp.bfloat16), jnp.zeros(heads), bias
    beta = jax.nn.sigmoid(normal(1, tokens, heads, dtype=jnp.float32))
    segments = jnp.arange(tokens, dtype=jnp.int32)[None] // document + 1
    value, gradient = (normal(1, tokens, heads, WIDTH) for _ in range(2))
    state = normal(1, heads, WIDTH, WIDTH, dtype=jnp.float32)
    return query * jnp.bfloat16(WIDTH**-0.5), key, value, log_decay, beta, segments, gradient, state


def with_gate(decay, rule):
    """`rule` of arrays whose log decay is made by the gate that a case's decay names: by the rule or in front of it."""
    if "gate" not in decay:
        return rule

    def gated(query, key, value, arrays, *rest, **options):
        raw, *of_gate = arrays
        gate = DecayGate(*of_gate, decay.split()[0])
        if decay.endswith("in front"):
            return rule(query, key, value, gate(raw), *rest, **options)
        return rule(query, key, value, raw, *rest, gate=gate, **options)

    return gated


def forward(decay, *arrays):
    return with_gate(decay, partial(delta_rule, implementation="pallas"))(*arrays)[0]


def step(decay, query, key, value, log_decay, beta, segments, gradient):
    arrays = query, key, value, log_decay, beta
    output, transpose = jax.vjp(lambda *arrays: forward(decay, *arrays, segments), *arrays)
    return output, transpose(gradient)


def recurrence(*arrays, segment_ids, initial_state):
    """Token by token; a long row in blocks, whose states alone are kept: no document may start with a block."""
    if segment_ids.shape[1] % BLOCK:
        return reference.delta_rule(*arrays, segment_ids, initial_state=initial_state)

    @jax.checkpoint
    def step(state, tokens):
        output, state = reference.delta_rule(*tokens, initial_state=state)
        return state, output

    blocks = [array.reshape(array.shape[0], -1, BLOCK, *array.shape[2:]) for array in (*arrays, segment_ids)]
    state, output = jax.lax.scan(step, initial_state, [jnp.moveaxis(array, 1, 0) for array in blocks])
    return jnp.moveaxis(output, 0, 1).reshape(arrays[2].shape), state


def check(tokens, by_channel, key_heads, decay, document):
    """Print relative errors of the results and of all gradients against the recurrence in float64, on the CPU."""
    *arrays, segments, gradient, state = draw(tokens, max(2, key_heads), key_heads, by_channel, decay, document, seed=1)

    def all_of(rule, segments, gradient, *arrays):
        rule = partial(rule, segment_ids=segments)
        results, transpose = jax.vjp(lambda *arrays: rule(*arrays[:5], initial_state=arrays[5]), *arrays)
        gradients = gradient.astype(results[0].dtype), arrays[5].astype(results[1].dtype)
        return *results, *transpose(gradients)

    rule = with_gate(decay, partial(delta_rule, implementation="pallas"))
    got = jax.jit(partial(all_of, rule))(segments, gradient, *arrays, state)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda array: jnp.asarray(np.asarray(array, np.float64)), (gradient, *arrays, state))
        rule = with_gate(decay + " in front" if "gate" in decay else decay, recurrence)
        want = jax.jit(partial(all_of, rule))(jnp.asarray(np.asarray(segments)), *wide)
    errors, names = [], (*RESULTS[:5], *(OF_GATE if "gate" in decay else RESULTS[5:6]), *RESULTS[6:])
    for name, result, expected in zip(names, *map(jax.tree.leaves, (got, want)), strict=True):
        result, expected = (np.asarray(array, np.float64) for array in (result, expected))
        errors.append(f"{name} {np.linalg.norm(result - expected) / np.linalg.norm(expected):.1e}")
    kind = "KDA" if by_channel else "GDN"
    print(f"check {kind} T{tokens} {decay} decay, documents of {document}: {', '.join(errors)}", flush=True)


def floors(tokens, heads, key_heads, by_channel, decay):
    """(FLOPs, bytes) of a forward pass and of forward and backward, every array read or written once."""
    products = tokens * heads * WIDTH * 2
    vectors = tokens * WIDTH * 2 * (2 * key_heads + heads)  # query, key and value in bfloat16
    scalars = tokens * heads * ((2 if "gate" in decay else 4) * (WIDTH if by_channel else 1) + 4)
    output = tokens * heads * WIDTH * 2
    forward = products * (5 * CHUNK + 3 * WIDTH), vectors + scalars + output
    backward = products * (14 * CHUNK + 8 * WIDTH), 2 * (vectors + scalars) + output
    return forward, tuple(map(sum, zip(forward, backward, strict=True)))


def lowered(case, part):
    """The function of a case, to be compiled; None if the kernels cannot take it."""
    *arrays, gradient, _ = jax.eval_shape(partial(draw, *case))
    function = jax.jit(partial(step if part == "step" else forward, case[4]))
    try:
        return function.lower(*arrays, gradient) if part == "step" else function.lower(*arrays)
    except ValueError as error:
        print(error)
        return None


def run(only, median_seconds, report):
    for length, by_channel, key_heads, decay, document in (
        (200, True, 2, "strong", 200),
        (500, True, 2, "strong", 60),
        (500, True, 2, "slow", 500),
        (500, True, 2, "unbounded", 130),
        (500, True, 32, "bounded gate", 130),
        (500, True, 32, "softplus gate", 130),
        (500, False, 2, "strong", 60),
        (500, False, 1, "slow", 500),
        (32768, True, 2, "strong", 32768),
        (32768, False, 2, "slow", 32768),
    ):
        check(length, by_channel, key_heads, decay, document)
    cases = [(name, part) for name in CASES for part in ("forward", "step") if only in f"{name} {part}"]
    cases = [(name, part) for name, part in cases if part == "forward" or CASES[name][0] <= LONGEST_STEP]
    # Lowered by one thread: two at once have crashed in Mosaic GPU.
    functions = [lowered(CASES[name], part) for name, part in cases]
    with ThreadPoolExecutor() as pool:
        functions = list(pool.map(lambda function: function and function.compile(), functions))
    for (name, part), function in zip(cases, functions, strict=True):
        *arrays, gradient, _ = draw(*CASES[name])
        if part == "step":
            arrays.append(gradient)
        if function is not None:
            floor = floors(*CASES[name][:5])[part == "step"]
            report(f"{name} {part}", median_seconds(function, *arrays), *floor, function)
        del arrays, gradient
