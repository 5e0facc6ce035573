"""LatentMoe: against a NumPy forward and released relatives, and split over meshes against one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import ActivationConfig, MeshConfig, ModelConfig, MoeConfig, RouterConfig
from mmjax.models.moe import LatentMoe, RouterBias, RouterStatistics
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec, state_specs

ROWS, POSITIONS, WIDTH = 8, 6, 12
MOE = MoeConfig(num_experts=16, experts_per_token=3, expert_width=8, latent_width=10, num_shared_experts=2)
MODEL = ModelConfig(
    width=WIDTH,
    moe=dataclasses.replace(MOE, router=RouterConfig(quantile_bins=50, balance_coefficient=1.0, z_coefficient=1.0)),
    initializer_range=0.3,
    parameter_dtype="float64",
    compute_dtype="float64",
)
FORCED = (1, 2, 3)  # experts that a large bias makes every token take: one slice of every mesh below


def with_moe(**changes):
    return dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, **changes))


@functools.cache
def make(model):
    """(graph, parameters, bias) of a module, all drawn at random by NumPy, which compiles nothing."""
    graph, *states = nnx.split(LatentMoe(model), nnx.Param, RouterBias)
    random = np.random.default_rng(1)
    draw = lambda leaf: jnp.asarray(random.normal(size=leaf.shape, scale=0.3), leaf.dtype)  # noqa: E731
    return graph, *jax.tree.map(draw, states)


def draw(dtype=np.float64):
    random = np.random.default_rng(0)
    inputs, cotangent = random.normal(size=(2, ROWS, POSITIONS, WIDTH)).astype(dtype)
    is_real = np.ones((ROWS, POSITIONS), bool)
    is_real[:, 4:] = False
    is_real[5:] = False  # 20 of 48 tokens are real; three devices of eight hold padding alone
    return inputs, is_real, cotangent * is_real[:, :, None]


def run(model, mesh_config, inputs, is_real, cotangent, forced=()):
    """(output, statistics summed over the mesh, gradients of parameters and inputs) on a mesh."""
    graph, parameters, bias = make(model)
    bias = jax.tree.map(lambda leaf: leaf.at[jnp.asarray(forced, jnp.int32)].set(10.0), bias)

    def on_device(parameters, bias, inputs, is_real, cotangent):
        def loss(parameters, inputs):
            output, statistics = nnx.merge(graph, parameters, bias)(inputs, is_real.astype(jnp.int32))
            extra = 0.7 * statistics.balance_loss + 0.3 * statistics.z_loss
            return lax.psum(jnp.sum(output * cotangent) + extra, DATA_AXES), (output, statistics)

        gradients, (output, statistics) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, inputs)
        return output, jax.tree.map(lambda leaf: lax.psum(leaf, DATA_AXES), statistics), *gradients

    tokens = spec("batch", "position", None)
    mesh = make_mesh(mesh_config)
    specs = state_specs(parameters, mesh.shape)
    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, state_specs(bias, mesh.shape), tokens, spec("batch", "position"), tokens),
        out_specs=(tokens, RouterStatistics(*(PartitionSpec(),) * len(RouterStatistics._fields)), specs, tokens),
        check_vma=True,
    )
    results = jax.jit(step)(parameters, bias, jnp.asarray(inputs), jnp.asarray(is_real), jnp.asarray(cotangent))
    return jax.tree.map(np.asarray, results)


def assert_near(results, expected, tolerance):
    """Every leaf within `tolerance` of its own scale."""
    results, expected = jax.tree.map(np.asarray, (results, expected))
    for (path, result), wanted in zip(jax.tree.leaves_with_path(results), jax.tree.leaves(expected), strict=True):
        error, scale = np.abs(result - wanted).max(initial=0), np.abs(wanted).max(initial=0)
        assert error <= tolerance * scale, f"{jax.tree_util.keystr(path)}: {error} of {scale}"


def situ(gate, up):
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


@pytest.mark.parametrize("resident", [0, 4])
def test_the_layer_follows_its_formula_token_by_token(resident):
    """Experts with weights of their own, or groups of them with the same."""
    model, num_resident = with_moe(resident_experts=resident), resident or MOE.num_experts
    with jax.enable_x64(True):
        inputs, is_real, cotangent = draw()
        output, statistics, _, _ = run(model, MeshConfig(), inputs, is_real, cotangent)
        w = {name: np.asarray(v.get_value()) for name, v in make(model)[1].items() if name != "shared"}
        shared = {name: np.asarray(v.get_value()) for name, v in make(model)[1]["shared"].items()}
        bias = np.asarray(make(model)[2]["bias"].get_value())
        assert len(w["gate"]) == num_resident
        load = np.zeros(MOE.num_experts, int)
        for row, position in np.argwhere(is_real):
            x = inputs[row, position]
            scores = 1 / (1 + np.exp(-x @ w["router"]))
            taken = np.argsort(-(scores + bias), kind="stable")[: MOE.experts_per_token]
            load[taken] += 1
            z = x @ w["latent_down"]
            weights = [(scores[e] / scores[taken].sum(), e % num_resident) for e in taken]
            mixed = sum(share * situ(z @ w["gate"][e], z @ w["up"][e]) @ w["down"][e] for share, e in weights)
            normed = mixed / np.sqrt(np.mean(mixed**2) + MODEL.norm_epsilon) * w["latent_norm"]
            expected = normed @ w["latent_up"] + situ(x @ shared["gate"], x @ shared["up"]) @ shared["down"]
            np.testing.assert_allclose(output[row, position], expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(statistics.load, load)
        np.testing.assert_array_equal(statistics.histogram.sum(axis=1), np.full(MOE.num_experts, is_real.sum()))


@pytest.mark.parametrize(
    ("mesh", "settings", "forced"),
    [
        (MeshConfig(expert=8), {}, ()),
        (MeshConfig(tensor=2, expert=4), {"capacity_factor": 0.3, "exchange_chunks": 3}, FORCED),
        (MeshConfig(fsdp=2, tensor=2, expert=2), {"capacity_factor": 0.5, "transport": "ring"}, FORCED[:1]),
        (MeshConfig(context=2, expert=4), {"capacity_factor": 0.5, "expert_axes": "context_and_expert"}, ()),
        pytest.param(MeshConfig(replica=2, context=2, expert=2), {"capacity_factor": 0.5}, (), marks=pytest.mark.slow),
        pytest.param(MeshConfig(expert=8), {"capacity_factor": 0.2}, FORCED[:1], marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(expert=8), {"capacity_factor": 0.2, "transport": "ring"}, FORCED, marks=pytest.mark.slow
        ),
        pytest.param(
            MeshConfig(tensor=2, context=2, expert=2),
            {"capacity_factor": 0.5, "transport": "ring", "expert_axes": "context_and_expert"},
            FORCED,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MeshConfig(fsdp=2, tensor=2, expert=2),
            {"capacity_factor": 0.5, "transport": "ragged", "exchange_chunks": 2},
            FORCED,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MeshConfig(expert=8),
            {"capacity_factor": 0.2, "transport": "by_node", "node_devices": 2},
            FORCED,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MeshConfig(tensor=2, context=2, expert=2),
            {
                "capacity_factor": 0.5,
                "transport": "by_node",
                "node_devices": 4,
                "expert_axes": "context_and_expert",
            },
            FORCED[:1],
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshConfig(fsdp=8), {}, (), marks=pytest.mark.slow),
        pytest.param(MeshConfig(tensor=8), {}, (), marks=pytest.mark.slow),
    ],
    ids=lambda value: str({k: v for k, v in value.sizes.items() if v > 1}) if isinstance(value, MeshConfig) else None,
)
def test_every_mesh_gives_the_values_gradients_and_counts_of_one_device(ragged_on_cpu, mesh, settings, forced):
    with jax.enable_x64(True):
        model = with_moe(**settings)
        arrays = draw()
        whole, split = (list(run(model, m, *arrays, forced=forced)) for m in (MeshConfig(), mesh))
        num_devices = mesh.num_devices // mesh.tensor
        assert whole[1].rounds == 0 and split[1].rounds >= num_devices * (mesh.expert > 1)
        split[1] = split[1]._replace(rounds=whole[1].rounds)
        assert_near(split[1][-2:], whole[1][-2:], 1e-12)
        split[1], whole[1] = (counts._replace(balance_loss=0, z_loss=0) for counts in (split[1], whole[1]))
        assert_near(split[0] * arrays[1][:, :, None], whole[0] * arrays[1][:, :, None], 1e-12)
        assert_near(split[2:], whole[2:], 1e-12)
        jax.tree.map(np.testing.assert_array_equal, split[1], whole[1])
        assert split[1].dropped == 0 and split[1].load.sum() == arrays[1].sum() * MOE.experts_per_token
        if forced:
            assert np.all(split[1].load[list(forced)] == arrays[1].sum())


def test_float32_on_a_mesh_stays_near_one_device():
    model = dataclasses.replace(with_moe(capacity_factor=0.5), parameter_dtype="float32", compute_dtype="float32")
    arrays = draw(np.float32)
    whole, split = (run(model, m, *arrays) for m in (MeshConfig(), MeshConfig(fsdp=2, tensor=2, expert=2)))
    assert_near(split[2:], whole[2:], 1e-4)


def test_drop_counts_exactly_what_does_not_fit():
    with jax.enable_x64(True):
        inputs, is_real, cotangent = draw()
        model = with_moe(capacity_factor=0.5, overflow="drop")
        _, statistics, _, _ = run(model, MeshConfig(expert=4), inputs, is_real, cotangent, forced=FORCED)
        # All choices go to the first device; each device's buffer for it holds ceil(0.5 * 12 * 3 / 4) = 5.
        real_tokens = is_real.reshape(4, -1).sum(axis=1)
        assert statistics.dropped == np.maximum(real_tokens * MOE.experts_per_token - 5, 0).sum()
        assert statistics.load.sum() == is_real.sum() * MOE.experts_per_token


def test_what_padding_holds_changes_no_count_and_no_gradient():
    with jax.enable_x64(True):
        inputs, is_real, cotangent = draw()
        other = np.where(is_real[:, :, None], inputs, 1e3)
        first, second = (run(MODEL, MeshConfig(), x, is_real, cotangent) for x in (inputs, other))
        jax.tree.map(np.testing.assert_array_equal, first[1], second[1])
        assert_near(second[2], first[2], 1e-12)
        np.testing.assert_array_equal(second[3][~is_real], 0)


def test_equal_router_rows_give_the_same_gradients_and_counts_when_rematerialised():
    with jax.enable_x64(True):
        graph, parameters, bias = make(MODEL)
        router = parameters["router"].get_value()
        tied = nnx.merge(graph, parameters, bias)
        tied.router.set_value(jnp.broadcast_to(router[:, :1], router.shape))
        tied.bias.set_value(jnp.zeros_like(tied.bias.get_value()))
        graph, parameters, bias = nnx.split(tied, nnx.Param, RouterBias)
        inputs, is_real, cotangent = map(jnp.asarray, draw())
        policy = jax.checkpoint_policies.save_only_these_names("router_index", "router_threshold")

        def step(remat):
            def apply(parameters, inputs):
                return nnx.merge(graph, parameters, bias)(inputs, is_real.astype(jnp.int32))

            layer = jax.checkpoint(apply, policy=policy) if remat else apply

            def loss(parameters, inputs):
                output, statistics = layer(parameters, inputs)
                return jnp.sum(output * cotangent), statistics

            return jax.shard_map(
                jax.grad(loss, argnums=(0, 1), has_aux=True),
                mesh=make_mesh(MeshConfig()),
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
                check_vma=False,
            )

        # Decided once: the backward pass holds no second top-k.
        assert str(jax.make_jaxpr(step(True))(parameters, inputs)).count("top_k[") == 1
        (kept, kept_statistics), (again, again_statistics) = (
            jax.jit(step(remat))(parameters, inputs) for remat in (False, True)
        )
        assert_near(again, kept, 1e-13)
        jax.tree.map(np.testing.assert_array_equal, again_statistics, kept_statistics)
        np.testing.assert_array_equal(kept_statistics.load[:3], np.full(3, is_real.sum()))


def kimi_linear_model(router):
    moe = MoeConfig(
        num_experts=8,
        experts_per_token=3,
        expert_width=12,
        latent_width=0,
        num_shared_experts=1,
        router=dataclasses.replace(router, balancing="sign", scale=2.446),
    )
    return ModelConfig(width=WIDTH, moe=moe, activation=ActivationConfig(kind="silu"), initializer_range=0.3)


def test_the_layer_equals_the_released_kimi_linear_in_values_and_gradients(one_device):
    torch = pytest.importorskip("torch")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    model = kimi_linear_model(RouterConfig())
    config = kimi.KimiLinearConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=model.moe.expert_width,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        hidden_act="silu",
        num_hidden_layers=1,
        linear_attn_config={
            "head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4, "full_attn_layers": [1], "kda_layers": []
        },
    )  # fmt: skip
    theirs = kimi.KimiLinearMoE(config)
    random = np.random.default_rng(0)
    for tensor in (*theirs.parameters(), theirs.gate.e_score_correction_bias):
        tensor.data = torch.asarray(random.normal(size=tuple(tensor.shape), scale=0.3).astype(np.float32))
    inputs, _, cotangent = draw(np.float32)
    their_inputs = torch.asarray(inputs).requires_grad_()
    their_output = theirs(their_inputs)
    their_output.backward(torch.asarray(cotangent))

    def ours_from(get):
        gate, up = np.split(get(theirs.experts.gate_up_proj), 2, axis=1)
        shared = theirs.shared_experts
        return {
            "router": get(theirs.gate.weight).T,
            "gate": gate.swapaxes(1, 2),
            "up": up.swapaxes(1, 2),
            "down": get(theirs.experts.down_proj).swapaxes(1, 2),
            "shared": {name: get(getattr(shared, f"{name}_proj").weight).T for name in ("gate", "up", "down")},
        }

    graph, parameters, bias = make(model)
    parameters = nnx.State(parameters)
    nnx.replace_by_pure_dict(parameters, jax.tree.map(jnp.asarray, ours_from(lambda t: t.detach().numpy())))
    bias = jax.tree.map(lambda _: jnp.asarray(theirs.gate.e_score_correction_bias.numpy()), bias)

    @one_device
    def values_and_gradients(parameters, inputs, cotangent):
        def apply(parameters, inputs):
            return nnx.merge(graph, parameters, bias)(inputs, jnp.ones((ROWS, POSITIONS), jnp.int32))[0]

        output, transpose = jax.vjp(apply, parameters, inputs)
        return output, *transpose(cotangent)

    results = jax.jit(values_and_gradients)(parameters, jnp.asarray(inputs), jnp.asarray(cotangent))
    expected = (their_output.detach().numpy(), ours_from(lambda t: t.grad.numpy()), their_inputs.grad.numpy())
    assert_near((results[0], nnx.to_pure_dict(results[1]), results[2]), expected, 1e-5)


def test_the_group_limited_router_equals_the_released_deepseek():
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from pallas_kernels.moe.api import select_experts, weigh_experts

    config = deepseek.DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = deepseek.DeepseekV3TopkRouter(config)
    random = np.random.default_rng(0)
    router.weight.data = torch.asarray(random.normal(size=(16, WIDTH), scale=0.3).astype(np.float32))
    router.e_score_correction_bias = torch.asarray(random.normal(size=16, scale=0.3).astype(np.float32))
    with torch.no_grad():
        logits, weights, index = (x.numpy() for x in router(torch.asarray(draw(np.float32)[0])))
    bias = jnp.asarray(router.e_score_correction_bias.numpy())
    logits = jnp.asarray(logits)
    ours = select_experts(logits, bias, experts_per_token=3, scoring="sigmoid", num_groups=4, top_groups=2).index
    our_weights = weigh_experts(logits, ours, scoring="sigmoid", renormalise=True, scale=2.5)
    order, our_order = np.argsort(index, axis=1), np.argsort(np.asarray(ours), axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(ours), our_order, 1), np.take_along_axis(index, order, 1)
    )
    sorted_weights = np.take_along_axis(np.asarray(our_weights), our_order, 1)
    np.testing.assert_allclose(sorted_weights, np.take_along_axis(weights, order, 1), rtol=1e-6)
