"""Adapters as files of peft: stock peft puts them on the transformers model, whose logits are then ours; and back."""

import importlib
import json
import pkgutil

import jax
import numpy as np
import pytest

from mmjax.checkpoint.peft import _TAKEN_FOR_EXPERTS, CONFIG, WEIGHTS, export_adapter, read_adapter
from mmjax.config import LoraConfig
from mmjax.data.batch import Batch
from mmjax.errors import CheckpointError
from mmjax.models import families
from mmjax.models.families import deepseek_v3, kimi_linear, llama, minimax_m2, qwen3_moe, qwen3_next
from mmjax.models.lora import define_adapted, match
from tests.mmjax.models.families.conftest import random_factors

torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
load_file, save_file = (getattr(pytest.importorskip("safetensors.numpy"), name) for name in ("load_file", "save_file"))
# peft looks for these patterns among modules only, though it applies them to parameters; and what it calls is renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


def tiny_llama(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    in_float64(modeling_llama, modeling_rope_utils)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return llama, transformers.LlamaForCausalLM(config)


def tiny_kimi_linear(in_float64):
    from transformers.models.kimi_linear import modeling_kimi_linear

    in_float64(modeling_kimi_linear)
    config = transformers.KimiLinearConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=3,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts=13,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
        first_k_dense_replace=1,
        linear_attn_config={
            "head_dim": 8,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3],
            "kda_layers": [1, 2],
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return kimi_linear, transformers.KimiLinearForCausalLM(config)


def tiny_deepseek(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    in_float64(modeling_deepseek_v3, modeling_rope_utils)
    config = transformers.DeepseekV3Config(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=6,
        qk_nope_head_dim=8,
        v_head_dim=10,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return deepseek_v3, transformers.DeepseekV3ForCausalLM(config)


def tiny_qwen3_next(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3_next import modeling_qwen3_next

    in_float64(modeling_qwen3_next, modeling_rope_utils)
    config = transformers.Qwen3NextConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=14,
        mlp_only_layers=[0],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return qwen3_next, transformers.Qwen3NextForCausalLM(config)


def tiny_qwen3_moe(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    in_float64(modeling_qwen3_moe, modeling_rope_utils)
    config = transformers.Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=13,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return qwen3_moe, transformers.Qwen3MoeForCausalLM(config)


def tiny_minimax(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.minimax_m2 import modeling_minimax_m2

    in_float64(modeling_minimax_m2, modeling_rope_utils)
    config = transformers.MiniMaxM2Config(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=13,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
        experts_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    return minimax_m2, transformers.MiniMaxM2ForCausalLM(config)


def batch_of(vocabulary_size: int) -> Batch:
    """Two rows of one document each."""
    tokens = np.random.default_rng(0).integers(3, vocabulary_size, (2, 17)).astype(np.int32)
    fields = {name: np.zeros((2, 17), np.int32) for name in ("targets", "loss_weight")}
    return Batch(
        tokens=tokens,
        segment_ids=np.ones((2, 17), np.int32),
        positions=np.broadcast_to(np.arange(17, dtype=np.int32), (2, 17)),
        feature_index=np.full((2, 17), -1, np.int32),
        patches=np.zeros((2, 8, 48), np.float32),
        patch_segment_ids=np.zeros((2, 8), np.int32),
        patch_position=np.zeros((2, 8, 3), np.int32),
        patch_grid=np.ones((2, 8, 3), np.int32),
        patch_feature=np.full((2, 2), -1, np.int32),
        spectrograms=np.zeros((2, 0, 0, 0), np.float32),
        sound_index=np.full((2, 17), -1, np.int32),
        **fields,
    )


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        pytest.param(tiny_llama, LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "down_proj")), id="llama"),
        pytest.param(tiny_kimi_linear, LoraConfig(rank=4, alpha=7.0, rank_stabilised=True), id="kimi_linear"),
        pytest.param(tiny_deepseek, LoraConfig(rank=3, expert_rank=2, experts="shared_down"), id="deepseek"),
        pytest.param(tiny_qwen3_next, LoraConfig(rank=2), id="qwen3_next"),
        pytest.param(tiny_qwen3_moe, LoraConfig(rank=2), id="qwen3_moe"),
        pytest.param(tiny_minimax, LoraConfig(rank=2), id="minimax_m2"),
        pytest.param(tiny_kimi_linear, LoraConfig(rank=4, targets=("w1", "kv_b_proj", "f_b_proj")), id="gates alone"),
    ],
)
def test_stock_peft_gives_our_logits_and_comes_back(make, lora, in_float64, randomise, peft_parity):
    family, theirs = make(in_float64)
    peft_parity(family, randomise(theirs), lora, batch_of(theirs.config.vocab_size))


def test_all_families_whose_projections_peft_takes_for_experts_are_named():
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    names = [f"{families.__name__}.{module.name}" for module in pkgutil.iter_modules(families.__path__)]
    kinds = [kind for name in names for kind in getattr(importlib.import_module(name), "MODEL_TYPES", ())]
    taken = {kind for kind in kinds if _MODEL_TO_CONVERSION_PATTERN.get(kind) == "qwen2_moe"}
    assert taken == set(_TAKEN_FOR_EXPERTS)


def test_adapters_that_do_not_fit_are_refused(in_float64, randomise, save, ours_in_float64, tmp_path):
    family, theirs = tiny_llama(in_float64)
    released = save(randomise(theirs))
    with jax.enable_x64(True):
        model, _, _ = ours_in_float64(family, released)
    tensors, lora = list(family.released_tensors(model)), LoraConfig(rank=3, targets=("q_proj",))
    matched = match(model, lora, tensors)
    factors = random_factors(define_adapted(model, lora, matched))
    export_adapter(tmp_path, model, lora, matched, tensors, "llama", factors)

    def refused(lora: LoraConfig, text: str) -> None:
        with pytest.raises(CheckpointError, match=text):
            read_adapter(tmp_path, model, lora, match(model, lora, tensors), tensors, "llama")

    refused(LoraConfig(rank=4, targets=("q_proj",)), "found r=3")
    refused(LoraConfig(rank=3, targets=("q_proj", "k_proj")), r"no base_model.model.model.layers.0.self_attn.k_proj")
    refused(LoraConfig(rank=3, targets=("k_proj",)), "q_proj.lora_A.weight.* besides")
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    refused(lora, "use_dora")
    (tmp_path / CONFIG).write_text("{")
    refused(lora, "JSONDecodeError")
    (tmp_path / CONFIG).write_text(json.dumps(config))
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-8])
    refused(lora, WEIGHTS)


def test_adapters_of_joined_weights_come_back_whole_or_not_at_all(
    in_float64, randomise, save, ours_in_float64, tmp_path
):
    """`kv_b_proj` holds our key_up and value_up, each with a rank of its own."""
    family, theirs = tiny_deepseek(in_float64)
    released = save(randomise(theirs))
    with jax.enable_x64(True):
        model, _, _ = ours_in_float64(family, released)
    tensors, lora = list(family.released_tensors(model)), LoraConfig(rank=3, targets=("kv_b_proj",))
    matched = match(model, lora, tensors)
    factors = random_factors(define_adapted(model, lora, matched))

    def write(change, described=None):
        tensors_there = {name: change(name, tensor.copy()) for name, tensor in load_file(tmp_path / WEIGHTS).items()}
        save_file(tensors_there, tmp_path / WEIGHTS)
        config = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps(config | (described or {})))

    def read():
        return read_adapter(tmp_path, model, lora, matched, tensors, "deepseek_v3")

    def export(change=lambda name, tensor: tensor, described=None):
        export_adapter(tmp_path, model, lora, matched, tensors, "deepseek_v3", factors)
        write(change, described)

    def without_b(name, tensor):
        return tensor * (".lora_A." in name)

    # Before the first step: nothing but A, which each part has its own of.
    export(without_b)
    for path, factor in read().items():
        np.testing.assert_array_equal(factor, factors[path] if path.endswith("down") else 0 * factor, err_msg=path)
    # From peft, with one A for all rows: no direction may end without A and B, where nothing is learnt.
    export(lambda name, tensor: without_b(name, tensor[:3] if ".lora_A." in name else tensor[:, :3]))
    read_again = read()
    assert all(np.abs(factor).max(axis=-2).all() for path, factor in read_again.items() if path.endswith("down"))
    # Trained on in peft, all six directions reach both parts.
    for change, described, message in (
        (lambda name, tensor: tensor + 1, None, "found rank 6 in"),
        (lambda name, tensor: tensor * np.float32("nan"), None, "NaN or infinite"),
        (lambda name, tensor: tensor, {"lora_alpha": 0, "alpha_pattern": {}}, "a scale of 0"),
        (lambda name, tensor: tensor, {"lora_alpha": None, "alpha_pattern": {}}, "TypeError"),
        (lambda name, tensor: tensor, {"rank_pattern": {"(": 1}}, "rror"),
    ):
        export(change, described)
        with pytest.raises(CheckpointError, match=message):
            read()


def test_an_a_of_each_expert_is_not_taken_for_one_of_all(in_float64, randomise, save, ours_in_float64, tmp_path):
    family, theirs = tiny_deepseek(in_float64)
    released = save(randomise(theirs))
    with jax.enable_x64(True):
        model, _, _ = ours_in_float64(family, released)
    tensors = list(family.released_tensors(model))
    lora = LoraConfig(rank=3, expert_rank=2, targets=(r".*\.experts\..*",), experts="shared_down")
    matched = match(model, lora, tensors)
    # As experts that are modules of their own, and as one parameter of all experts.
    for kind in ("kimi_k3", "deepseek_v3"):
        factors = random_factors(define_adapted(model, lora, matched))
        export_adapter(tmp_path / kind, model, lora, matched, tensors, kind, factors)
        for path, factor in read_adapter(tmp_path / kind, model, lora, matched, tensors, kind).items():
            np.testing.assert_array_equal(factor, factors[path], err_msg=path)
        there = load_file(tmp_path / kind / WEIGHTS)
        name = next(name for name in sorted(there, reverse=True) if ".lora_A." in name)
        there[name] = there[name] + np.arange(len(there[name]), dtype=np.float32)[:, None]
        save_file(there, tmp_path / kind / WEIGHTS)
        with pytest.raises(CheckpointError, match="with an A of each expert"):
            read_adapter(tmp_path / kind, model, lora, matched, tensors, kind)


def test_names_of_modules_are_the_golden_ones(in_float64, randomise, save, ours_in_float64, tmp_path):
    family, theirs = tiny_deepseek(in_float64)
    released = save(randomise(theirs))
    with jax.enable_x64(True):
        model, _, _ = ours_in_float64(family, released)
    tensors, lora = list(family.released_tensors(model)), LoraConfig(rank=3, alpha=6.0, expert_rank=1)
    matched = match(model, lora, tensors)
    export_adapter(
        tmp_path, model, lora, matched, tensors, "deepseek_v3", random_factors(define_adapted(model, lora, matched))
    )
    config = json.loads((tmp_path / CONFIG).read_text())
    names = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj")
    assert config["target_modules"] == list(names)
    dense = [f"{owner}.{name}_proj.weight" for owner in ("mlp", "shared_experts") for name in ("down", "gate", "up")]
    assert config["target_parameters"] == ["experts.down_proj", "gate_up_proj", *dense]
    # Keys and values have adapters of their own in one module; the gates and ups of all experts too.
    assert config["rank_pattern"] == {"gate_up_proj": 2, "kv_b_proj": 6, r"experts\.down_proj": 1}
    assert config["alpha_pattern"] == {"gate_up_proj": 4.0, "kv_b_proj": 12.0, r"experts\.down_proj": 2.0}
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    layer = "base_model.model.model.layers.1.mlp"
    assert {name: shape for name, shape in shapes.items() if name.startswith(layer)} == {
        f"{layer}.experts.base_layer.lora_A.weight": (2 * 12, 24),
        f"{layer}.experts.base_layer.lora_B.weight": (16, 2 * 12),
        f"{layer}.experts.lora_A.weight": (12, 8),
        f"{layer}.experts.lora_B.weight": (24, 12),
        **{f"{layer}.shared_experts.{name}_proj.lora_A.weight": (3, 24) for name in ("gate", "up")},
        **{f"{layer}.shared_experts.{name}_proj.lora_B.weight": (8, 3) for name in ("gate", "up")},
        f"{layer}.shared_experts.down_proj.lora_A.weight": (3, 8),
        f"{layer}.shared_experts.down_proj.lora_B.weight": (24, 3),
    }
