"""Which projections get adapters, and that one adapted projection is the merged one, whichever way it is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from mmjax.config import IndexerConfig, LoraConfig, ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import kimi_k3, llama
from mmjax.models.layers import LoraWeight, project
from mmjax.models.lora import define_adapted, match, matched_lines, merge, scale_of
from mmjax.models.multimodal import define
from mmjax.presets.deepseek import deepseek_v32
from mmjax.presets.fuyu import fuyu_8b
from mmjax.presets.glm5_next import glm53_flash_text
from mmjax.presets.kimi_k3 import kimi_k3_tiny
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llama import smollm2_135m
from mmjax.presets.llava import llava_next_vicuna_7b
from mmjax.presets.qwen3_next import qwen3_next_80b
from mmjax.presets.qwen3_vl import qwen3_vl_4b

K3 = kimi_k3_tiny()
TENSORS = list(kimi_k3.released_tensors(K3))
PACKED = dataclasses.replace(K3, moe=dataclasses.replace(K3.moe, expert_width=32, expert_storage="mxfp4"))


def paths(*targets: str, released=TENSORS, **settings) -> list[str]:
    """Last words of what is matched, each once."""
    found = match(K3, LoraConfig(rank=4, targets=targets, **settings), released)
    return sorted({projection.path.split("layers.")[-1].split(".", 1)[-1] for projection in found})


def refusal(*targets: str, released=TENSORS, **settings) -> str:
    with pytest.raises(ConfigurationError) as error:
        paths(*targets, released=released, **settings)
    return str(error.value)


def test_all_linear_is_every_projection_and_experts_but_no_table_head_or_router():
    matched = {projection.path for projection in match(K3, LoraConfig(rank=4), TENSORS)}
    definition = define(K3)
    left = {path.split("layers.")[-1].split(".", 1)[-1] for path in definition.parameters if path not in matched}
    left = {name for name in left if "norm" not in name and "residual" not in name}
    assert left == {
        *("embedding", "head", "mlp.router", "patch_embedding", "position_table"),
        *(f"mixer.{name}_convolution" for name in ("query", "key", "value")),
        *("mixer.log_rate", "mixer.decay_bias"),
    }
    lines = dict(matched_lines(K3, LoraConfig(rank=8), match(K3, LoraConfig(rank=8))))
    assert lines["decoder.segments.1.layers.0.mlp.gate"] == "2 layers x 16 experts, rank 2"
    assert lines["decoder.segments.1.layers.0.mixer.query"] == "2 layers, rank 8"


def test_every_array_of_the_model_is_frozen_once_under_the_path_it_has_without_adapters():
    for model in (K3, PACKED):
        definition, plain = define_adapted(model, LoraConfig(rank=4), match(model, LoraConfig(rank=4))), define(model)
        assert definition.frozen.keys() == plain.parameters.keys() | plain.frozen.keys()
        assert definition.router_biases.keys() == plain.router_biases.keys()
        assert all(path.endswith((".down", ".up")) for path in definition.parameters)


def test_names_are_released_ones_or_ours_or_expressions_of_either():
    assert paths("q_proj", "w1") == ["mixer.query", "mlp.gate"]
    assert paths("experts.w1") == paths(r".*\.experts\.\d+\.w1") == ["mlp.gate"]
    assert paths("mixer.query", released=()) == ["mixer.query"]
    assert paths(r".*\.mixer\.(query|output)", released=()) == ["mixer.output", "mixer.query"]
    # One released module that holds two of ours.
    assert paths("kv_b_proj") == ["mixer.key_up", "mixer.value_up"]
    # The same released name in two kinds of layers.
    assert paths("g_proj") == ["mixer.output_gate"]
    assert paths("q_proj", "w1", "w2", exclude=("w1",)) == ["mixer.query", "mlp.down"]
    experts = {projection.path for projection in match(K3, LoraConfig(rank=1)) if projection.num_experts}
    without = {projection.path for projection in match(K3, LoraConfig(rank=1, experts="none"))}
    assert experts and without == {projection.path for projection in match(K3, LoraConfig(rank=1))} - experts


def test_what_cannot_be_adapted_is_an_error_that_says_what_to_do():
    assert "matches nothing" in refusal("q_prj") and "did you mean 'q_proj'" in refusal("q_prj")
    assert "matches nothing" in refusal("q_proj", "absent")
    assert "tables, heads, routers" in refusal("lm_head")
    assert "tables, heads, routers" in refusal("block_sparse_moe.gate")
    assert "mend it" in refusal("q_(proj")
    assert "matches nothing" in refusal("q_proj", exclude=("absent",))
    assert "exclude less" in refusal("q_proj", exclude=(r".*q_proj",))
    # Layers 1 and 2 are one stack.
    assert "give names without the number" in refusal(r".*layers\.1\..*q_proj")
    assert "give names without the number" in refusal("experts.3.w2")
    assert "did you mean 'query'" in refusal("qery", released=())


def test_a_pattern_takes_all_of_a_family_whose_layers_are_one_stack():
    model = ModelConfig(
        num_layers=3,
        full_attention_layers=(0, 1, 2),
        full_attention_kind="grouped",
        residual="plain",
        moe=dataclasses.replace(K3.moe, num_dense_layers=3),
        vision=dataclasses.replace(K3.vision, num_layers=0),
    )
    matched = match(model, LoraConfig(rank=4, targets=("q_proj", "down_proj")), llama.released_tensors(model))
    assert sorted(projection.path.rsplit("layers.0.")[-1] for projection in matched) == ["mixer.query", "mlp.down"]
    assert {projection.shape[0] for projection in matched} == {3}


def test_scales_follow_the_rank_or_its_root():
    assert scale_of(LoraConfig(rank=16, alpha=8.0)) == 0.5
    assert scale_of(LoraConfig(rank=16, alpha=8.0, rank_stabilised=True)) == 2.0


@pytest.mark.parametrize(
    ("equation", "inputs", "weight", "num_inputs", "is_row"),
    [
        ("bsd,dhk->bshk", (2, 3, 4), (4, 5, 6), 1, False),
        ("bshv,hvd->bsd", (2, 3, 4, 5), (4, 5, 6), 2, True),
        ("...f,fd->...d", (2, 3, 4), (4, 5), 1, True),
        ("bpd,dchk->cbphk", (2, 3, 4), (4, 3, 2, 5), 1, False),
        # Used from its outputs' side, as absorbed attention uses the keys' factor.
        ("bshn,rhn->bshr", (2, 3, 4, 5), (6, 4, 5), 1, False),
    ],
)
def test_an_adapted_projection_is_the_merged_one(equation, inputs, weight, num_inputs, is_row, one_device):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        values, base = (jnp.asarray(random.normal(size=shape)) for shape in (inputs, weight))
        down = jnp.asarray(random.normal(size=(*weight[:num_inputs], 2)))
        up = jnp.asarray(random.normal(size=(2, *weight[num_inputs:])))

        def variable(array: jax.Array) -> nnx.Variable:
            return nnx.Param(array, array_axes=(None,) * array.ndim, whole_shape=array.shape)

        def adapted(values, base, down, up):
            parts = map(variable, (base, down, up))
            return project(equation, values, LoraWeight(*parts, scale=0.7, num_input_axes=num_inputs), is_row=is_row)

        def merged(values, base, down, up):
            change = jnp.tensordot(down, up, axes=1)
            return project(equation, values, variable(base + 0.7 * change), is_row=is_row)

        def value_and_gradients(function):
            def run(*arrays):
                value, pull = jax.vjp(function, *arrays)
                return value, pull(jnp.cos(value))

            return one_device(run)(values, base, down, up)

        ours, theirs = value_and_gradients(adapted), value_and_gradients(merged)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_merging_keeps_dtypes_and_unpacks_experts():
    lora = LoraConfig(rank=4, targets=("mixer.query", "mlp.down"), experts="shared_down")
    model = dataclasses.replace(PACKED, parameter_dtype="bfloat16")
    matched = match(model, lora)
    definition, random = define_adapted(model, lora, matched), np.random.default_rng(0)

    def draw(variable: nnx.Variable) -> np.ndarray:
        described = variable.get_value()
        if described.dtype == np.uint8:
            return random.integers(110, 130, described.shape, np.uint8)
        return np.asarray(random.normal(size=described.shape), described.dtype)

    base = {path: draw(variable) for path, variable in definition.frozen.items()}
    factors = {path: draw(variable) for path, variable in definition.parameters.items()}
    merged = merge(model, lora, matched, factors, base)
    dense = define(dataclasses.replace(model, moe=dataclasses.replace(model.moe, expert_storage="dense")))
    assert {path: (array.shape, array.dtype) for path, array in merged.items()} == {
        path: (v.get_value().shape, v.get_value().dtype) for path, v in dense.parameters.items()
    }
    changed = {path for path in base if path in merged and not np.array_equal(base[path], merged[path])}
    assert changed == {projection.path for projection in matched if not projection.is_packed}


def test_indexers_take_adapters_too():
    full = dataclasses.replace(K3.full_attention, indexer=IndexerConfig(stage="sparse"))
    model = dataclasses.replace(K3, full_attention=full)
    found = {projection.path for projection in match(model, LoraConfig(rank=4, targets=("indexer.key",)))}
    assert len(found) == 3 and all(path.endswith("mixer.indexer.key") for path in found)


@pytest.mark.parametrize(
    "make",
    [
        kimi_k3_tiny,
        glm53_flash_text,
        llava_next_vicuna_7b,
        pytest.param(qwen3_vl_4b, marks=pytest.mark.slow),
        pytest.param(qwen3_next_80b, marks=pytest.mark.slow),
        pytest.param(kimi_linear_48b, marks=pytest.mark.slow),
        pytest.param(deepseek_v32, marks=pytest.mark.slow),
        pytest.param(fuyu_8b, marks=pytest.mark.slow),
        pytest.param(smollm2_135m, marks=pytest.mark.slow),
    ],
)
def test_every_factor_of_a_family_reaches_what_the_model_gives(make, make_batch, one_device):
    """A weight that is used without `project` would fail, a factor that nothing reads would train nothing."""
    model = dataclasses.replace(make(), parameter_dtype="float32", compute_dtype="float32")
    lora = LoraConfig(rank=4)
    definition = define_adapted(model, lora, match(model, lora))
    groups = [
        {path: variable.get_value() for path, variable in group.items()}
        for group in (definition.parameters, definition.router_biases, definition.frozen)
    ]

    def run(parameters, biases, frozen, batch):
        return definition.assemble(parameters, biases, frozen)(batch)

    batch = make_batch(model, rows=1, row_tokens=64, row_patches=24)
    jaxpr = jax.make_jaxpr(one_device(run))(*groups, batch).jaxpr
    _, is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    # The factors come first, in the order of a pytree.
    assert [path for path, used in zip(sorted(definition.parameters), is_used, strict=False) if not used] == []
