"""The GPU kernels of the cross-entropy against the whole logits: interpreted, compiled without a GPU, and on one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.cross_entropy import chunked, pallas_triton, reference
from pallas_kernels.cross_entropy.api import cross_entropy, cross_entropy_and_gradients


def draw(tokens, width, vocabulary, counted, seed=0):
    """(hidden, head, targets, weights): `counted` tokens count; logits of about 3."""
    random = np.random.default_rng(seed)
    hidden = jnp.asarray(random.normal(size=(tokens, width)), jnp.bfloat16)
    head = jnp.asarray(3 * random.normal(size=(width, vocabulary)) * width**-0.5, jnp.bfloat16)
    weights = np.zeros(tokens, np.float32)
    weights[random.permutation(tokens)[:counted]] = random.uniform(0.5, 2, counted)
    targets = np.where(weights == 0, -100, random.integers(0, vocabulary, tokens)).astype(np.int32)
    return hidden, head, jnp.asarray(targets), jnp.asarray(weights)


def test_where_mosaic_kernels_are_simulated_these_are_not_taken():
    hidden, head, *_ = draw(4, 16, 32, 4)
    with launcher.simulated():
        assert pallas_triton.reason_against(hidden, head, 4) == "needs a Hopper GPU (compute capability 9.0)"


def differentiated(loss_of, cotangent, hidden, head, targets, weights):
    """(loss, gradient of the hidden values, of the head) for a cotangent."""
    loss, transpose = jax.vjp(lambda hidden, head: loss_of(hidden, head, targets, weights), hidden, head)
    return loss, *transpose(jnp.asarray(cotangent, loss.dtype))


def errors(found, cotangent, arrays, **settings):
    """Relative to float64: of the loss, and of both gradients."""
    with jax.enable_x64(True):
        hidden, head, targets, weights = (np.asarray(array) for array in arrays)
        wide = [jnp.asarray(array.astype(np.float64)) for array in (hidden, head)]
        loss_of = partial(reference.cross_entropy, **settings)
        want = jax.jit(partial(differentiated, loss_of))(cotangent, *wide, jnp.asarray(targets), jnp.asarray(weights))
        want = [np.asarray(array) for array in want]
    result = []
    for one, other in zip(found, want, strict=True):
        one = np.asarray(one, np.float64)
        assert np.isfinite(one).all()
        result.append(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30))
    return result


@pytest.mark.parametrize(
    ("tokens", "counted", "vocabulary", "settings"),
    [
        (13, 9, 75, {}),
        (13, 13, 64, {"soft_cap": 5.0, "z_loss": 1e-2}),
        (7, 7, 50, {"soft_cap": 5.0}),
        (1, 1, 33, {}),
        (5, 0, 33, {}),
    ],
)
def test_interpreted_kernels_are_near_float64_in_loss_and_gradients(tokens, counted, vocabulary, settings):
    arrays = draw(tokens, 8, vocabulary, counted)
    for logits_dtype, tolerance in ((jnp.float32, 4e-3), (jnp.bfloat16, 1e-2)):
        options = chunked.Options(
            chunk_tokens=4,
            vocabulary_axis=None,
            is_head_trained=True,
            head_gradient_dtype=np.dtype(np.float32),
            logits_dtype=np.dtype(logits_dtype),
            soft_cap=settings.get("soft_cap"),
            z_loss=settings.get("z_loss", 0.0),
            kernels=pallas_triton.Settings(interpret=True, block=16),
        )
        loss_of = partial(chunked.cross_entropy, options)
        found = jax.jit(partial(differentiated, loss_of))(-3.0, *arrays)
        assert max(errors(found, -3.0, arrays, **settings)) < tolerance


def test_a_vocabulary_axis_of_one_device_takes_one_pass_over_the_logits():
    from jax.sharding import PartitionSpec

    arrays = draw(13, 8, 64, 9)
    options = chunked.Options(
        chunk_tokens=4,
        vocabulary_axis="tensor",
        is_head_trained=True,
        head_gradient_dtype=np.dtype(np.float32),
        logits_dtype=np.dtype(np.float32),
        soft_cap=None,
        z_loss=0.0,
        kernels=pallas_triton.Settings(interpret=True, block=16),
    )
    outputs = PartitionSpec(), PartitionSpec(), PartitionSpec(None, "tensor")
    run = jax.jit(
        jax.shard_map(
            partial(differentiated, partial(chunked.cross_entropy, options), 2.0),
            mesh=jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(PartitionSpec(), PartitionSpec(None, "tensor"), PartitionSpec(), PartitionSpec()),
            out_specs=outputs,
            # Interpreted kernels do not say over which axes their values vary.
            check_vma=False,
        )
    )
    assert max(errors(run(*arrays), 2.0, arrays)) < 4e-3
    text = str(run.trace(*arrays).jaxpr)
    assert "cross_entropy_measure_and_differentiate" in text and "cross_entropy_differentiate" not in text


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_passes_over_a_part_of_the_vocabulary_equal_the_pass_over_all(soft_cap):
    """What a vocabulary split over devices takes one by one."""
    random = np.random.default_rng(2)
    logits = jnp.asarray(4 * random.normal(size=(5, 70)), jnp.float32)
    targets = jnp.asarray([3, 69, -1, 70, 0], jnp.int32)
    weights = jnp.asarray(random.uniform(0.5, 2, 5), jnp.float32)
    settings = pallas_triton.Settings(interpret=True, block=32)
    to_logits, log_total, target_logit = pallas_triton.measure_and_differentiate(
        logits, targets, weights, jnp.float32, soft_cap, 1e-2, settings
    )
    largest, total, same_target_logit = pallas_triton.measure(logits, targets, soft_cap, settings)
    np.testing.assert_allclose(largest + jnp.log(total), log_total, rtol=1e-6)
    np.testing.assert_array_equal(same_target_logit, target_logit)
    np.testing.assert_array_equal(target_logit[2:4], 0)
    of_total = weights * (1 + 2e-2 * log_total)
    same = pallas_triton.differentiate(logits, targets, log_total, of_total, weights, jnp.float32, soft_cap, settings)
    np.testing.assert_allclose(same, to_logits, rtol=1e-5, atol=1e-7)


def test_the_head_may_be_summed_in_another_dtype():
    hidden, head, targets, weights = draw(12, 8, 40, 12)
    wide = cross_entropy_and_gradients(hidden, head, targets, weights, chunk_tokens=4)
    narrow = cross_entropy_and_gradients(
        hidden, head, targets, weights, chunk_tokens=4, head_gradient_dtype=jnp.bfloat16, logits_dtype=jnp.bfloat16
    )
    assert wide.to_head.dtype == jnp.float32 and narrow.to_head.dtype == jnp.bfloat16
    assert max(errors(wide, 1.0, (hidden, head, targets, weights))) < 4e-3
    assert max(errors(narrow, 1.0, (hidden, head, targets, weights))) < 2e-2
    frozen = cross_entropy_and_gradients(hidden, head, targets, weights, chunk_tokens=4, is_head_trained=False)
    assert frozen.to_head is None
    np.testing.assert_array_equal(frozen.to_hidden, wide.to_hidden)


def test_what_the_kernels_cannot_take_is_said():
    arrays = draw(4, 8, 40, 4)
    with pytest.raises(ValueError, match="'pallas' of cross_entropy needs a Hopper GPU"):
        cross_entropy(*arrays, chunk_tokens=4, implementation="pallas")
    with pytest.raises(ValueError, match="differentiate cross_entropy instead"):
        cross_entropy_and_gradients(*arrays, chunk_tokens=4, implementation="reference")


@pytest.mark.slow
def test_a_step_compiles_without_a_gpu_and_holds_one_chunk_of_logits(described_gpus):
    """Also inside `shard_map`, the vocabulary split over two devices."""
    from jax.sharding import AbstractDevice, AxisType, Mesh, NamedSharding, PartitionSpec

    chunk, (tokens, width, vocabulary) = 256, (1024, 512, 8128)
    shapes = ((tokens, width), (width, vocabulary), (tokens,), (tokens,))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32)
    for num_devices, axis in ((1, None), (2, "tensor")):
        mesh = Mesh(np.array(described_gpus[:num_devices]), ("tensor",), axis_types=(AxisType.Auto,))
        specs = (PartitionSpec(), PartitionSpec(None, axis), PartitionSpec(), PartitionSpec())
        outputs = PartitionSpec(), specs[0], specs[1]
        loss_of = partial(
            cross_entropy,
            chunk_tokens=chunk,
            vocabulary_axis=axis,
            logits_dtype=jnp.bfloat16,
            implementation="pallas",
        )
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
        abstract = mesh.abstract_mesh.update(abstract_device=device)
        step = jax.shard_map(partial(differentiated, loss_of, 1.0), mesh=abstract, in_specs=specs, out_specs=outputs)
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
        ]
        with jax.sharding.use_abstract_mesh(abstract):
            # Products of Triton would be split over the vocabulary here, where they are not tried out.
            options = {"xla_gpu_enable_triton_gemm": False}
            compiled = jax.jit(step, compiler_options=options).lower(*arguments).compile()
        text = compiled.as_text()
        assert f"bf16[{chunk},{vocabulary // num_devices}]" in text
        assert f"[{tokens},{vocabulary // num_devices}]" not in text
        memory = compiled.memory_analysis()
        head_sum, logits = 4 * width * vocabulary // num_devices, 2 * chunk * vocabulary // num_devices
        # And what the library of matrix products works in.
        assert memory.temp_size_in_bytes < head_sum + logits + 6 * tokens * width + 2**23


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "counted", "vocabulary", "settings"),
    [(300, 200, 5003, {}), (256, 256, 16384, {"soft_cap": 5.0, "z_loss": 1e-3}), (1, 1, 33, {}), (65, 0, 4096, {})],
)
def test_on_a_gpu_they_are_near_float64_twice_alike(tokens, counted, vocabulary, settings):
    arrays = draw(tokens, 512, vocabulary, counted)
    for logits_dtype, tolerance in ((None, 4e-3), (jnp.bfloat16, 1e-2)):
        loss_of = partial(
            cross_entropy, chunk_tokens=128, logits_dtype=logits_dtype, implementation="pallas", **settings
        )
        run = jax.jit(partial(differentiated, loss_of))
        found, again = (run(-3.0, *arrays) for _ in range(2))
        assert max(errors(found, -3.0, arrays, **settings)) < tolerance
        for one, other in zip(found, again, strict=True):
            np.testing.assert_array_equal(one, other)
