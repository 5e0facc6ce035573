"""Kimi Delta Attention: against the implementations in transformers, split over devices, document by document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import LinearAttentionConfig, MeshConfig, ModelConfig
from mmjax.models.layers import initial_arrays
from mmjax.models.linear_attention import KimiDeltaAttention
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec, state_specs
from pallas_kernels.linear_attention import api
from pallas_kernels.linear_attention.gates import DecayGate

SEGMENTS = np.array([[1] * 7 + [2] * 9 + [3] + [4] * 5 + [0], [1] * 2 + [2] * 18 + [3, 0, 0]], np.int32)
WIDTH, HEADS, HEAD_WIDTH = 24, 4, 6


def model_config(dtype: str = "float64", **linear_attention) -> ModelConfig:
    widths = {
        "key_width": HEAD_WIDTH,
        "value_width": HEAD_WIDTH,
        "decay_rank": HEAD_WIDTH,
        "output_gate_rank": HEAD_WIDTH,
    }
    linear = LinearAttentionConfig(**{"num_heads": HEADS, "chunk_tokens": 16, **widths, **linear_attention})
    return ModelConfig(width=WIDTH, parameter_dtype=dtype, compute_dtype=dtype, linear_attention=linear)


def split(model: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """A module with every parameter random, norms and biases included."""
    graph, state = nnx.split(KimiDeltaAttention(model))
    random = np.random.default_rng(1)
    return graph, jax.tree.map(lambda leaf: jnp.asarray(0.5 * random.normal(size=leaf.shape), leaf.dtype), state)


def inputs_and_cotangent(dtype=np.float64, shape=SEGMENTS.shape) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(2)
    return tuple(jnp.asarray(random.normal(size=(*shape, WIDTH)), dtype) for _ in range(2))


def assert_trees_close(found, expected, tolerance):
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.asarray(other)).max()
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= tolerance * scale, jax.tree_util.keystr(path)


@pytest.fixture(params=["reference", "xla"])
def implementation(request, monkeypatch) -> str:
    """Both forms of the delta rule, whichever one `auto` would take for these sizes."""
    monkeypatch.setattr(
        "mmjax.models.linear_attention.delta_rule", functools.partial(api.delta_rule, implementation=request.param)
    )
    return request.param


def value_and_gradients(graph, segments):
    """Function of (state, inputs, cotangent): the output, and gradients (state, inputs) of output * cotangent."""

    def loss(state, inputs, cotangent):
        output = nnx.merge(graph, state)(inputs, jnp.asarray(segments))
        return jnp.vdot(output, cotangent), output

    def run(state, inputs, cotangent):
        (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, inputs, cotangent)
        return output, gradients

    return run


def heads(matrix) -> np.ndarray:
    """torch's [H * K, D] -> [D, H, K]."""
    return matrix.T.reshape(matrix.shape[1], HEADS, -1)


def from_released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    weights = {
        "decay_down": tensors["forget_gate.f_a_proj.weight"].T,
        "decay_up": heads(tensors["forget_gate.f_b_proj.weight"]),
        "log_rate": tensors["forget_gate.A_log"].reshape(HEADS),
        "decay_bias": tensors["forget_gate.dt_bias"].reshape(HEADS, -1),
        "beta": tensors["b_proj.weight"].T,
        "output_gate_down": tensors["g_a_proj.weight"].T,
        "output_gate_up": heads(tensors["g_b_proj.weight"]),
        "output_norm": tensors["o_norm.weight"],
        "output": tensors["o_proj.weight"].T.reshape(HEADS, -1, WIDTH),
    }
    for name, taps in zip(("query", "key", "value"), np.split(tensors["conv1d.weight"], 3), strict=True):
        weights[f"{name}_convolution"] = taps[:, 0].T.reshape(-1, HEADS, HEAD_WIDTH)
        weights[name] = heads(tensors[f"{name[0]}_proj.weight"])
    return weights


def glm5_next():
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

    config = Glm5NextTextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        linear_num_heads=HEADS,
        linear_head_dim=HEAD_WIDTH,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        rms_norm_eps=1e-5,
    )
    return Glm5NextTextLinearAttention(config, 0)


def kimi_linear():
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    layers = {"full_attn_layers": [2], "kda_layers": [1]}
    linear = {"head_dim": HEAD_WIDTH, "num_heads": HEADS, "short_conv_kernel_size": 4, **layers}
    config = KimiLinearConfig(hidden_size=WIDTH, num_hidden_layers=2, rms_norm_eps=1e-5, linear_attn_config=linear)
    return KimiLinearDeltaAttention(config, 0)


@functools.cache
def run_transformers(make_module):
    """Weights, output, gradient of the inputs and gradients of the weights of a random module of theirs."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module = make_module().float()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    inputs, cotangent = (np.array(array) for array in inputs_and_cotangent(np.float32, (2, 40)))
    given = torch.tensor(inputs, requires_grad=True)
    output = module(given)
    (output * torch.tensor(cotangent)).sum().backward()
    weights = from_released({name: tensor.detach().numpy() for name, tensor in module.named_parameters()})
    gradients = from_released({name: tensor.grad.numpy() for name, tensor in module.named_parameters()})
    return weights, output.detach().numpy(), given.grad.numpy(), gradients


@pytest.mark.parametrize(("theirs", "decay"), [(glm5_next, "bounded"), (kimi_linear, "softplus")])
def test_values_and_gradients_equal_transformers(one_device, implementation, theirs, decay):
    weights, *expected = run_transformers(theirs)
    graph, state = nnx.split(KimiDeltaAttention(model_config("float32", decay=decay, output_gate="low_rank")))
    assert jax.tree.map(np.shape, nnx.to_pure_dict(state)) == jax.tree.map(np.shape, weights)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, weights))
    run = jax.jit(one_device(value_and_gradients(graph, np.ones((2, 40), np.int32))))
    output, (gradients, input_gradient) = run(state, *inputs_and_cotangent(np.float32, (2, 40)))
    assert_trees_close([output, input_gradient, nnx.to_pure_dict(gradients)], expected, 1e-5)


@pytest.mark.parametrize("slow_decay", [False, True])
def test_a_document_moves_nothing_of_another(one_device, implementation, slow_decay):
    """Also right behind the boundary, where the convolution reaches back, and with a state that hardly forgets."""
    with jax.enable_x64(True):
        graph, state = split(model_config())
        if slow_decay:
            state["decay_bias"].set_value(jnp.full_like(state["decay_bias"].get_value(), -12.0))
            state["log_rate"].set_value(jnp.zeros_like(state["log_rate"].get_value()))
        inputs, cotangent = inputs_and_cotangent()
        second = jnp.asarray(SEGMENTS == 2)[..., None]
        run = jax.jit(one_device(value_and_gradients(graph, SEGMENTS)))
        before, before_gradients = run(state, inputs, jnp.where(second, cotangent, 0))
        changed = jnp.where(second, inputs, 3 * inputs[:, ::-1] + 1)
        after, after_gradients = run(state, changed, jnp.where(second, cotangent, 0))
    is_second = SEGMENTS == 2
    np.testing.assert_array_equal(np.asarray(before)[is_second], np.asarray(after)[is_second])
    jax.tree.map(np.testing.assert_array_equal, before_gradients, after_gradients)
    assert not np.asarray(before_gradients[1])[~is_second].any()
    assert (np.asarray(before) != np.asarray(after))[~is_second].any()


def test_a_packed_document_equals_the_document_alone(one_device, implementation):
    with jax.enable_x64(True):
        graph, state = split(model_config())
        inputs, _ = inputs_and_cotangent()
        call = jax.jit(one_device(lambda state, inputs, segments: nnx.merge(graph, state)(inputs, segments)))
        packed = np.asarray(call(state, inputs, SEGMENTS))
        for row, document in ((0, 2), (1, 2)):
            here = np.flatnonzero(SEGMENTS[row] == document)
            alone = np.zeros_like(inputs)
            alone[row, : len(here)] = inputs[row, here]
            segments = np.zeros_like(SEGMENTS)
            segments[row, : len(here)] = 1
            found = np.asarray(call(state, alone, segments))[row, : len(here)]
            np.testing.assert_allclose(found, packed[row, here], rtol=0, atol=1e-12 * np.abs(packed).max())


@pytest.mark.parametrize(
    ("output_gate", "mesh"), [("full", MeshConfig(tensor=2)), ("low_rank", MeshConfig(fsdp=2, tensor=2))]
)
def test_split_over_devices_equals_one_device(one_device, implementation, output_gate, mesh):
    with jax.enable_x64(True):
        graph, state = split(model_config(output_gate=output_gate))
        inputs, cotangent = inputs_and_cotangent()
        expected = jax.jit(one_device(value_and_gradients(graph, SEGMENTS)))(state, inputs, cotangent)

        def loss(state, inputs, segments, cotangent):
            output = nnx.merge(graph, state)(inputs, segments)
            assert jax.typeof(output).manual_axis_type.varying == set(DATA_AXES)
            return jax.lax.psum(jnp.vdot(output, cotangent), DATA_AXES), output

        mesh = make_mesh(mesh)
        rows, specs = spec("batch", "position", None), state_specs(state, mesh.shape)
        (_, output), gradients = jax.jit(
            jax.shard_map(
                jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
                mesh=mesh,
                in_specs=(specs, rows, spec("batch", "position"), rows),
                out_specs=((PartitionSpec(), rows), (specs, rows)),
                check_vma=True,
            )
        )(state, inputs, SEGMENTS, cotangent)
    assert_trees_close((output, gradients), expected, 1e-10)


def test_half_precision_keeps_sensitive_parameters_and_gives_half_precision(one_device):
    graph, state = split(model_config("bfloat16"))
    dtypes = {name: leaf.dtype for name, leaf in nnx.to_pure_dict(state).items()}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == {"log_rate", "decay_bias", "output_norm"}
    inputs, cotangent = inputs_and_cotangent(jnp.bfloat16)
    output, gradients = jax.jit(one_device(value_and_gradients(graph, SEGMENTS)))(state, inputs, cotangent)
    assert output.dtype == jnp.bfloat16
    for leaf in jax.tree.leaves((output, gradients)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.parametrize(("decay", "lowest", "highest"), [("bounded", -0.48, -0.004), ("softplus", -1.6, -0.001)])
def test_a_new_module_decays_slowly(decay, lowest, highest):
    _, state = nnx.split(KimiDeltaAttention(model_config("float32", decay=decay, num_heads=64)))
    arrays = initial_arrays({name: state[name] for name in ("log_rate", "decay_bias")}, jax.random.key(0))
    raw = jnp.zeros((1, 1, *arrays["decay_bias"].shape))
    found = DecayGate(arrays["log_rate"], arrays["decay_bias"], decay)(raw)
    assert lowest < found.min() < 0.5 * lowest
    assert highest < 0 and 5 * highest < found.max() < highest
