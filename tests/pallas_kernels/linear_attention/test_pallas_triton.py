"""The GPU kernels of the delta rule against the recurrence: interpreted, compiled without a GPU, and on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.linear_attention import launches, pallas_triton, reference
from pallas_kernels.linear_attention.api import delta_rule
from pallas_kernels.linear_attention.documents import document_starts
from pallas_kernels.linear_attention.gates import DecayGate, Form

SETTINGS = launches.Settings(interpret=True, prepare_columns=8, gradient_columns=8, scan_width=8)
NAMES = ("output", "state", "query", "key", "value", "log_decay", "beta", "initial_state")
GATED = (*NAMES[:5], "raw", "log_rate", "bias", *NAMES[6:])
# Log decay of each token and channel: as bounded in Kimi-K3, hardly any, anything, and none or all at once.
DECAYS = {
    "bounded": lambda random, shape: -5 * random.uniform(0.2, 1, shape),
    "slow": lambda random, shape: -0.05 * random.uniform(0, 1, shape),
    "mixed": lambda random, shape: -np.exp(random.uniform(-9, 4.5, shape)),
    "saturated": lambda random, shape: np.where(random.random(shape) < 0.5, 0.0, -1000.0),
}


def draw(length, documents, decay="bounded", *, heads=2, key_heads=2, by_channel=True, widths=(16, 16), seed=0):
    """(query, key, value, log decay, beta, initial state), segments, and gradients of output and state."""
    random = np.random.default_rng(seed)
    key_width, value_width = widths
    query, key = random.normal(size=(2, 1, length, key_heads, key_width))
    query, key = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (query, key))
    value = random.normal(size=(1, length, heads, value_width))
    log_decay = DECAYS[decay](random, (1, length, heads, key_width) if by_channel else (1, length, heads))
    beta = random.uniform(0.2, 1, (1, length, heads))
    state = random.normal(size=(1, heads, key_width, value_width))
    gradients = random.normal(size=value.shape), random.normal(size=state.shape)
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in (query, key, value)]
    arrays += [jnp.asarray(array, jnp.float32) for array in (log_decay, beta, state)]
    segments = np.repeat(np.arange(1, len(documents) + 1), documents)[None, :length].astype(np.int32)
    return arrays, segments, [jnp.asarray(gradient, jnp.bfloat16) for gradient in gradients]


def with_gate(arguments, *, seed=7):
    """The same with the input of a gate, in bfloat16, its rate and its bias in the place of the decay."""
    arrays, segments, gradients = arguments
    random = np.random.default_rng(seed)
    shape = arrays[3].shape
    raw, bias = random.normal(size=shape), random.normal(size=shape[2:])
    log_rate = np.log(random.uniform(0.5, 4, shape[2]))
    gate = jnp.asarray(raw, jnp.bfloat16), *(jnp.asarray(array, jnp.float32) for array in (log_rate, bias))
    return [*arrays[:3], gate, *arrays[4:]], segments, gradients


@functools.cache
def gated(rule, kind):
    """`rule` of such arrays; the recurrence, which takes no gate, of what it makes of them."""

    def evaluate(query, key, value, arrays, *rest, **state):
        raw, *of_gate = arrays
        gate = DecayGate(*of_gate, kind)
        if rule is reference.delta_rule:
            return rule(query, key, value, gate(raw), *rest, **state)
        return rule(query, key, value, raw, *rest, gate=gate, **state)

    return evaluate


@functools.cache
def run(rule):
    """Jitted: results and gradients, in the order of NAMES."""

    def evaluate(arrays, segments, gradients):
        rule_of = lambda *arrays: rule(*arrays[:5], segments, initial_state=arrays[5])  # noqa: E731
        results, transpose = jax.vjp(rule_of, *arrays)
        return *results, *transpose(
            tuple(gradient.astype(result.dtype) for gradient, result in zip(gradients, results, strict=True))
        )

    return jax.jit(evaluate)


kernels = functools.partial(pallas_triton.delta_rule, settings=SETTINGS)
split_kernels = functools.partial(pallas_triton.delta_rule, settings=SETTINGS._replace(pieces=5))


def expected(arrays, segments, gradients, rule=reference.delta_rule):
    with jax.enable_x64(True):
        arrays, gradients = jax.tree.map(lambda array: jnp.asarray(np.asarray(array, np.float64)), (arrays, gradients))
        return jax.tree.map(np.asarray, run(rule)(arrays, jnp.asarray(segments), gradients))


def check(found, arrays, segments, gradients, tolerance, *, names=NAMES, rule=reference.delta_rule, **looser):
    too_large = {}
    results = map(jax.tree.leaves, (found, expected(arrays, segments, gradients, rule)))
    for name, one, other in zip(names, *results, strict=True):
        one = np.asarray(one, np.float64)
        assert np.isfinite(one).all(), name
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30)
        if error >= looser.get(name, tolerance):
            too_large[name] = float(error)
    assert not too_large


@pytest.mark.parametrize("is_scalar", [False, True])
def test_interpreted_kernels_are_near_float64_in_results_and_all_gradients(is_scalar):
    """Keys of 16 channels are nearly parallel, hence errors larger than those at 128 channels."""
    for decay in DECAYS:
        key_heads = 1 if is_scalar else 2
        arguments = draw(130, [60, 5, 1, 64], decay, key_heads=key_heads, by_channel=not is_scalar, seed=3)
        check(run(kernels)(*arguments), *arguments, tolerance=1e-2)


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_interpreted_kernels_compute_gates_and_gradients_of_all_that_goes_into_them(kind):
    for length, documents in ((130, [60, 5, 1, 64]), (192, [192]), (3, [2, 1])):
        arguments = with_gate(draw(length, documents, seed=3))
        found = run(gated(kernels, kind))(*arguments)
        check(found, *arguments, tolerance=1e-2, names=GATED, rule=gated(reference.delta_rule, kind))


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_rates_beyond_their_limits_count_as_those_and_get_no_gradient(kind):
    arrays, segments, gradients = with_gate(draw(70, [70], heads=3, key_heads=3))
    raw, _, bias = arrays[3]
    found = []
    for beyond in (0.0, 40.0):
        gate = raw, jnp.asarray([-60.0 - beyond, 0.5, 60.0 + beyond]), bias
        found.append(run(gated(kernels, kind))([*arrays[:3], gate, *arrays[4:]], segments, gradients))
    (_, _, _, _, _, (_, rate, _), *_), (_, _, _, _, _, (_, limited, _), *_) = found
    assert np.isfinite(found[0][0]).all()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert limited[1] == rate[1] != 0
    assert limited[0] == limited[2] == 0


@pytest.mark.parametrize(
    ("is_scalar", "reason"), [(False, "its input is float32, not bfloat16"), (True, "one decay a head")]
)
def test_gates_that_kernels_do_not_compute_stand_in_front_of_them(is_scalar, reason, caplog):
    (*arrays, beta, state), segments, gradients = with_gate(draw(70, [70], by_channel=not is_scalar))
    raw, *of_gate = arrays[3]
    raw = raw if is_scalar else raw.astype(jnp.float32) + 1e-3
    arguments = [*arrays[:3], (raw, *of_gate), beta, state], segments, gradients
    launcher.log_once.cache_clear()
    with caplog.at_level("INFO", logger="pallas_kernels"):
        found = jax.jit(run(gated(kernels, "softplus")))(*arguments)
    (record,) = caplog.records
    assert record.message.startswith(f"delta_rule: the decay gate is computed in front of the kernels ({reason}")
    check(found, *arguments, tolerance=1e-2, names=GATED, rule=gated(reference.delta_rule, "softplus"))
    given = [*arrays[:3], DecayGate(*of_gate, "softplus")(raw), beta, state]
    np.testing.assert_array_equal(found[0], run(kernels)(given, segments, gradients)[0])


def test_ragged_lengths_and_short_documents_are_near_float64():
    for length, documents in ((1, [1]), (65, [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])):
        arguments = draw(length, documents, "mixed")
        check(run(kernels)(*arguments), *arguments, tolerance=1e-2)


def moved(before, after, tokens):
    """Which results and gradients changed at the tokens."""
    places = [0, *range(2, 7)]
    return [
        NAMES[place] for place in places if (np.asarray(before[place]) != np.asarray(after[place]))[:, tokens].any()
    ]


@pytest.mark.parametrize("is_scalar", [False, True])
def test_no_bit_of_a_document_depends_on_another(is_scalar):
    arrays, segments, gradients = draw(130, [60, 5, 1, 64], "bounded", by_channel=not is_scalar)
    others, _, other_gradients = draw(130, [60, 5, 1, 64], "mixed", by_channel=not is_scalar, seed=1)
    inside = segments[0] == 2
    mixed = [
        jnp.where(inside.reshape(1, -1, *[1] * (old.ndim - 2)), new, old)
        for old, new in zip([*arrays[:5], gradients[0]], [*others[:5], other_gradients[0]], strict=True)
    ]
    before = run(kernels)(arrays, segments, gradients)
    after = run(kernels)([*mixed[:5], arrays[5]], segments, [mixed[5], gradients[1]])
    assert moved(before, after, ~inside) == []
    assert moved(before, after, inside) == [NAMES[place] for place in (0, *range(2, 7))]


def test_what_goes_into_a_gate_moves_no_bit_of_another_document_nor_of_an_earlier_token():
    """But that of the rate's and the bias's gradients, which are sums over all tokens."""
    arrays, segments, gradients = with_gate(draw(130, [60, 5, 1, 64]))
    raw, *of_gate = arrays[3]
    rule = run(gated(kernels, "bounded"))

    def results(raw):
        output, _, query, key, value, (raw, *_), beta, _ = rule(
            [*arrays[:3], (raw, *of_gate), *arrays[4:]], segments, gradients
        )
        return output, query, key, value, raw, beta

    def moved(raw, names, tokens):
        pairs = list(zip(before, results(raw), strict=True))[:names]
        return [bool((one != other)[:, tokens].any()) for one, other in pairs]

    before, place = results(raw), np.arange(130)
    document = (place >= 60) & (place < 65)
    changed = jnp.where(document[:, None, None], raw + 3, raw)
    assert moved(changed, 6, ~document) == [False] * 6
    assert moved(changed, 6, document) == [True] * 6
    changed = raw.at[:, 90].add(3)
    assert moved(changed, 1, place < 90) == [False]
    assert moved(changed, 1, place >= 90) == [True]


def test_no_bit_of_the_output_depends_on_a_later_token():
    arrays, segments, gradients = draw(130, [130])
    before = run(kernels)(arrays, segments, gradients)[0]
    for token in (37, 70):
        changed = [array.at[:, token].multiply(2) for array in arrays[:5]]
        after = run(kernels)([*changed, arrays[5]], segments, gradients)[0]
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert (before[:, token:] != after[:, token:]).any()


def test_rows_taken_in_pieces_give_the_results_of_whole_ones(monkeypatch):
    arguments = draw(150, [40, 60, 50])
    whole = run(kernels)(*arguments)
    lengths, rule = [], pallas_triton._delta_rule
    monkeypatch.setattr(pallas_triton, "MOST_BLOCKS", 1)
    monkeypatch.setattr(pallas_triton, "_delta_rule", lambda *all_: lengths.append(all_[2].shape[1]) or rule(*all_))
    for one, other in zip(whole, run(functools.partial(kernels))(*arguments), strict=True):
        np.testing.assert_array_equal(one, other)
    assert lengths == [64, 64, 64]


@pytest.mark.parametrize("is_scalar", [False, True])
def test_a_row_split_over_the_gpu_gives_what_the_recurrence_gives(is_scalar):
    for documents in ([320], [60, 140, 120]):
        for decay in ("bounded", "slow"):
            arguments = draw(310, documents, decay, key_heads=1 if is_scalar else 2, by_channel=not is_scalar, seed=5)
            found = run(split_kernels)(*arguments)
            check(found, *arguments, tolerance=1.2e-2)


@pytest.mark.parametrize("is_gated", [False, True])
def test_chunks_with_deep_tokens_alone_are_done_again(is_gated, monkeypatch):
    """What Hopper's kernels give of them is worthless; here it is zero in every chunk of two rows."""
    rows = draw(192, [60, 5, 1, 126], "mixed"), draw(192, [64, 100, 28], "mixed", seed=1)
    arrays, segments, gradients = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *rows)
    (query, key, value, log_decay, beta, state), (gradient, last) = arrays, gradients
    form, of_gate, decay, shallow = None, (), log_decay, -0.1
    if is_gated:
        form = Form("softplus", -5.0)
        of_gate = (form.rows(jnp.zeros(2), jnp.full((2, 16), 0.5)),)
        decay, shallow = -log_decay.astype(jnp.bfloat16), -3.0
    decay = decay.at[0, :64].set(shallow).at[1, 64:].set(shallow)
    bounds = pallas_triton._document_bounds(document_starts(segments))

    @jax.jit
    def evaluate():
        call = launches.Launches(SETTINGS, query, value, decay, form)
        prepared = call.prepare(query, key, value, decay, beta, *bounds, *of_gate)
        products, inverse, sums, depths, parts = prepared
        both = parts, products, inverse, value, beta, gradient, state, last.astype(jnp.float32)
        (state_gradients, solved, _), (states, written) = call.scan_both_ways(*both)
        tokens = query, key, sums, depths, beta, *bounds, states, state_gradients, written, solved, gradient
        gated = (decay, *of_gate) if is_gated else ()
        gradients = call.gradients(*tokens, gated=gated)
        call.is_on_hopper, call.looked_at = True, 3
        # Each row is deep by one half of the channels alone.
        share = jnp.asarray([[0.01, 1], [1, 0.01]])[..., None, None]
        halves = jnp.moveaxis(depths.of_tokens[None] * share, 2, 3)
        worthless = *jax.tree.map(jnp.zeros_like, (products, inverse, sums, list(parts))), halves
        monkeypatch.setattr(launches, "_prepare_on_hopper", lambda *_: worthless)
        worthless_gradients = [jnp.zeros_like(gradient) for gradient in gradients]
        worthless_gradients[2] = decay if is_gated else sums  # as it was
        monkeypatch.setattr(launches, "_gradients_on_hopper", lambda *_: worthless_gradients)
        again = call.prepare(query, key, value, decay, beta, *bounds, *of_gate)
        tokens = *tokens[:3], again[3], *tokens[4:]
        is_deep, again = again[3].is_deep, (*again[:3], again[3]._replace(is_deep=None), again[4])
        return is_deep, (prepared, gradients), (again, call.gradients(*tokens, gated=gated))

    is_deep, expected, found = evaluate()
    assert is_deep.tolist() == [[[0, 0], [1, 1], [1, 1]], [[1, 1], [0, 0], [0, 0]]]
    for row, deep_chunks in enumerate((range(1, 3), range(1))):
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            size = one.shape[1] // 3
            deep = slice(deep_chunks.start * size, deep_chunks.stop * size)
            np.testing.assert_array_equal(one[row, deep], other[row, deep])
    # What lies in the place of the decay's gradient stays.
    untouched = decay if is_gated else expected[0][2]
    np.testing.assert_array_equal(found[1][2][0, :64], untouched[0, :64])
    np.testing.assert_array_equal(found[1][2][1, 64:], untouched[1, 64:])
    for result in (found[0][0], *found[1][:2], *found[1][3:]):
        size = result.shape[1] // 3
        assert not result[0, :size].any()
        assert not result[1, size:].any()


def test_rows_are_split_only_where_few_heads_leave_the_gpu_idle(monkeypatch):
    monkeypatch.setattr(launcher, "num_multiprocessors", lambda: 132)

    def pieces(length, heads):
        found = []
        array = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
        calls = lambda array: launches.Launches(launches.Settings(pieces=None), array, array, array)  # noqa: E731
        jax.eval_shape(lambda array: found.append(calls(array).pieces), array)
        return found[0]

    assert [pieces(32768, heads) for heads in (1, 2, 4, 8, 9, 17, 32)] == [16, 16, 16, 8, 4, 1, 1]
    assert pieces(1024, 1) == 1


def test_what_the_kernels_cannot_take_is_said():
    query = jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    assert pallas_triton.reason_against(query, query, query) == "needs a Hopper GPU (compute capability 9.0)"
    with launcher.simulated():
        assert pallas_triton.reason_against(query, query, query) is None
        for wide in range(3):
            arrays = [query.astype(jnp.float32) if place == wide else query for place in range(3)]
            assert "needs bfloat16 queries, keys and values, got " in pallas_triton.reason_against(*arrays)
        narrow = query[..., :96]
        assert "widths of 64 or 128, got 96 and 128" in pallas_triton.reason_against(narrow, narrow, query)
        assert "widths of 64 or 128, got 128 and 96" in pallas_triton.reason_against(query, query, narrow)
        for shape in ((70000, 1, 1, 64), (2, 1, 70000, 64)):
            found = []
            many = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            jax.eval_shape(lambda many, found=found: found.append(pallas_triton.reason_against(many, many, many)), many)
            assert found == [f"takes up to 65535 rows and heads, got {shape[0]} rows of {shape[2]} heads"]
    arrays, segments, _ = draw(16, [16])
    with pytest.raises(ValueError, match="'pallas' of delta_rule needs a Hopper GPU"):
        delta_rule(*arrays[:5], jnp.asarray(segments), implementation="pallas")


def test_the_choice_of_the_plain_form_is_logged_once(caplog):
    arrays, segments, _ = draw(16, [16])
    launcher.log_once.cache_clear()
    with caplog.at_level("INFO", logger="pallas_kernels"):
        for _ in range(2):
            delta_rule(*arrays[:5], jnp.asarray(segments))
    assert [record.message for record in caplog.records] == [
        "delta_rule: reference (pallas needs a Hopper GPU (compute capability 9.0))"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize(
    ("by_channel", "key_heads", "settings", "kind"),
    [
        (True, 2, launches.Settings(), None),
        (True, 2, launches.Settings(), "bounded"),
        (True, 1, launches.Settings(), "softplus"),
        (False, 1, launches.Settings(), None),
        (False, 1, launches.Settings(pieces=2), None),
    ],
)
def test_kernels_compile_without_a_gpu_inside_a_checked_shard_map(
    by_channel, key_heads, settings, kind, described_gpus
):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(described_gpus), ("data",))
    arguments = draw(128, [128], key_heads=key_heads, by_channel=by_channel, widths=(128, 128))
    rule, by_row, by_gate = functools.partial(pallas_triton.delta_rule, settings=settings), PartitionSpec("data"), None
    if kind:
        # Rate and bias are the same everywhere, so that their gradients are summed over the rows.
        arguments, rule, by_gate = with_gate(arguments), gated(rule, kind), (by_row, PartitionSpec(), PartitionSpec())
    arrays = [by_row] * 3 + [by_gate or by_row] + [by_row] * 2
    specs = (arrays, by_row, [by_row] * 2), (by_row, by_row, *arrays)
    step = jax.shard_map(run(rule), mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    def shape(array, spec):
        rows = (2 * array.shape[0],) if spec == by_row else array.shape[:1]
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((*rows, *array.shape[1:]), array.dtype, sharding=sharding)

    shapes = jax.tree.map(shape, arguments, (arrays, by_row, [by_row] * 2))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(step).lower(*shapes).compile().as_text()
    kernels = ["prepare_chunks", "scan_chunks"]
    of_channels = ["prepare_again", "scan_chunks_back", "scan_states", "key_gradients", "gradients_again"]
    of_channels.append("value_gradients")
    kernels += of_channels if by_channel else ["scan_both_ways", "key_gradients_scalar"]
    kernels += ["carry", "carry_identity", "carry_back"] if settings.pieces == 2 else []
    for kernel in kernels:
        assert f'"{kernel}"' in text or f"{kernel}_mosaic_gpu" in text, kernel


def check_on_a_gpu(rule, lengths, by_channel, key_heads):
    """Near float64, and bitwise the same twice. All lengths in one program, which compiles equal kernels once.

    The gradients of beta and of one decay a head are one number a token, of sums whose terms cancel: the norm of few
    of them has fewer digits. Hence more heads where the decay is one a head.
    """
    heads = 2 if by_channel else 8
    rules = jax.jit(lambda cases: [run(rule)(*case) for case in cases])
    for decay in DECAYS:
        cases = [
            draw(
                length,
                [3, 60, 1, length],
                decay,
                heads=heads,
                key_heads=key_heads,
                by_channel=by_channel,
                widths=(128, 128),
            )
            for length in lengths
        ]
        for length, case, found, again in zip(lengths, cases, rules(cases), rules(cases), strict=True):
            check(found, *case, tolerance=5e-3, **({"beta": 8e-3} if length == 1 else {}))
            for one, other in zip(found, again, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("lengths", [(1, 15, 16, 63, 64), (65, 1000)])
@pytest.mark.parametrize(("by_channel", "key_heads"), [(True, 2), (False, 4)])
def test_results_on_a_gpu_are_near_float64_and_bitwise_repeatable(lengths, by_channel, key_heads):
    check_on_a_gpu(functools.partial(delta_rule, implementation="pallas"), lengths, by_channel, key_heads)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize(("by_channel", "key_heads"), [(True, 2), (False, 4)])
def test_results_of_blocks_that_take_many_chunks_on_a_gpu(by_channel, key_heads, monkeypatch):
    monkeypatch.setattr(launcher, "num_multiprocessors", lambda: 3)
    check_on_a_gpu(functools.partial(delta_rule, implementation="pallas"), (900,), by_channel, key_heads)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("pieces", [4, 16])
@pytest.mark.parametrize(("by_channel", "key_heads"), [(True, 2), (False, 4)])
def test_a_row_split_over_a_gpu_is_near_float64_and_bitwise_repeatable(by_channel, key_heads, pieces):
    rule = functools.partial(pallas_triton.delta_rule, settings=launches.Settings(pieces=pieces))
    check_on_a_gpu(rule, (2048,), by_channel, key_heads)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_results_with_a_gate_are_near_float64_and_bitwise_repeatable_on_a_gpu(kind, by_channel):
    """Of the gate's input, its rate and its bias: the gradient of the decay, summed over tokens for the last two.

    The rate's is one number a head, of sums whose terms cancel, so that it needs many: of 8 heads up to 1.1e-2 off, of
    32 up to 6.1e-3, of 64 at most 4.3e-3. The gate in front of the kernels gives the same digits.
    """
    rule = gated(functools.partial(delta_rule, implementation="pallas"), kind)
    arguments = draw(1000, [3, 60, 1, 936], by_channel=by_channel, heads=64, key_heads=64, widths=(128, 128))
    arguments = with_gate(arguments)
    found, again = run(rule)(*arguments), run(rule)(*arguments)
    check(found, *arguments, tolerance=5e-3, names=GATED, rule=gated(reference.delta_rule, kind))
    for one, other in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("seed", range(20, 24))
@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_other_draws_with_a_gate_are_near_float64_on_a_gpu(kind, seed):
    arguments = with_gate(draw(1000, [3, 60, 1, 936], heads=64, key_heads=64, widths=(128, 128), seed=seed), seed=seed)
    found = run(gated(functools.partial(delta_rule, implementation="pallas"), kind))(*arguments)
    check(found, *arguments, tolerance=5e-3, names=GATED, rule=gated(reference.delta_rule, kind))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
def test_gates_of_deep_chunks_on_a_gpu():
    """By a softplus some chunks are too deep for Mosaic's kernels; blocks take many chunks of either kind."""
    (*first, gate, beta, state), segments, gradients = with_gate(
        draw(900, [500, 400], heads=8, key_heads=4, widths=(128, 128))
    )
    raw, *of_gate = gate
    tokens = np.arange(900)[None, :, None, None]
    raw = jnp.where((tokens // 64 % 3 == 1) & (tokens % 64 < 20), raw + 30, raw - 2).astype(jnp.bfloat16)
    arguments = [*first, (raw, *of_gate), beta, state], segments, gradients
    found = run(gated(functools.partial(delta_rule, implementation="pallas"), "softplus"))(*arguments)
    check(found, *arguments, tolerance=5e-3, names=GATED, rule=gated(reference.delta_rule, "softplus"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
def test_arrays_of_more_than_2_31_numbers_give_every_bit_of_cut_ones_on_a_gpu(monkeypatch):
    """Of 532,480 tokens and 32 heads, chunks with deep tokens among them; needs 120 GiB."""
    block, blocks, heads = 32768, 16.25, 32
    length = int(block * blocks)

    @jax.jit
    def arguments():
        def part(seed):
            keys = jax.random.split(jax.random.key(seed), 6)
            wide = [jax.random.normal(key, (block, heads, 128), jnp.float32) for key in keys[:5]]
            query, key = (array / jnp.linalg.norm(array, axis=-1, keepdims=True) for array in wide[:2])
            decay = -jnp.minimum(jnp.exp(1.1 * wide[3] - 4.6), 1)
            # One chunk in 8 has tokens deeper than Mosaic's kernels take.
            deep = (jnp.arange(block) % 512 < 3)[:, None, None]
            beta = jax.nn.sigmoid(jax.random.normal(keys[5], (block, heads), jnp.float32))
            narrow = [array.astype(jnp.bfloat16) for array in (query, key, wide[2], wide[4])]
            return *narrow[:3], jnp.where(deep, decay * 500, decay), beta, narrow[3]

        parts = jax.lax.map(part, jnp.arange(int(blocks) + 1))
        return [array.reshape(1, -1, *array.shape[2:])[:, :length] for array in parts]

    *arrays, gradient = arguments()
    segments = jnp.arange(length, dtype=jnp.int32)[None] // 200_000 + 1

    def evaluate():
        @jax.jit
        def step(arrays, gradient):
            rule = functools.partial(delta_rule, segment_ids=segments, implementation="pallas")
            output, transpose = jax.vjp(lambda *arrays: rule(*arrays)[0], *arrays)
            return output, *transpose(gradient)

        return [np.asarray(array) for array in step(arrays, gradient)]

    whole = evaluate()
    monkeypatch.setattr(pallas_triton, "MOST_BLOCKS", 4096)
    for name, one, other in zip(("output", *NAMES[2:]), whole, evaluate(), strict=False):
        np.testing.assert_array_equal(one, other, err_msg=name)
