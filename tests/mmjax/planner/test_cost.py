"""FLOPs, MFU and the golden formula against cases worked by hand."""

import dataclasses
from collections import Counter

import pytest

from mmjax.config import FullAttentionConfig, LinearAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import Tuning, trained_arrays
from mmjax.planner.cost import (
    Branch,
    Message,
    adapter_forward_flops,
    alignment_penalty,
    batch_flops,
    communication_seconds,
    compute_entropy,
    forward_flops,
    golden_cost,
    model_flops_utilisation,
    training_flops,
    vision_forward_flops,
    vision_training_flops,
)
from mmjax.planner.parameters import parameter_arrays
from mmjax.presets.deepseek import deepseek_v32
from mmjax.presets.glm5_next import glm53_flash_text
from mmjax.presets.kimi_k3 import kimi_k3, kimi_k31
from mmjax.presets.llama import smollm2_135m
from mmjax.presets.qwen3_next import qwen3_next_80b

# One linear and one full layer, both with a dense MLP, small enough to count by hand.
HYBRID = ModelConfig(
    width=10,
    num_layers=2,
    vocabulary_size=100,
    full_attention_layers=(1,),
    residual="plain",
    linear_attention=LinearAttentionConfig(
        num_heads=1, key_width=4, value_width=4, convolution_width=4, decay_rank=2, chunk_tokens=8
    ),
    full_attention=FullAttentionConfig(
        num_heads=2, query_rank=0, latent_width=3, nope_width=2, shared_key_width=1, value_width=2, output_gate="none"
    ),
    moe=MoeConfig(num_dense_layers=2, dense_width=20),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=4, hidden_width=16, patch_pixels=2, channels=1),
)
# q, k, v; their taps; beta; decay; gate; output.
LINEAR_WEIGHTS = 3 * 40 + 4 * 12 + 10 + (20 + 8) + 40 + 40
# q; latent; keys and values from it; output.
FULL_WEIGHTS = 10 * 6 + 10 * 4 + 3 * 2 * (2 + 2) + 4 * 10
MLP_WEIGHTS, HEAD_WEIGHTS = 3 * 10 * 20, 1000
RECURRENCE = 6 * 16 + 8 * 12 + 64
# Tower: embedding 4 x 8; q, k, v, o 4 x 8 x 4; MLP 2 x 8 x 16. Projector of 4 patches: 32 x 32 + 32 x 10.
PATCH_WEIGHTS = 32 + 128 + 256 + (1024 + 320) / 4


def test_forward_flops_of_a_hybrid_by_hand():
    flops = {part: value for part, value in forward_flops(HYBRID, row_tokens=9).items() if value}
    assert flops == {
        "linear attention projections": 2 * LINEAR_WEIGHTS,
        "linear attention recurrence": RECURRENCE,
        "full attention projections": 2 * FULL_WEIGHTS,
        # 2 heads, keys of 3 and values of 2, and on average 5 of 9 keys.
        "full attention scores": 2 * 2 * (3 + 2) * 5,
        "dense MLP": 2 * 2 * MLP_WEIGHTS,
        "head": 2 * HEAD_WEIGHTS,
    }


def test_documents_of_a_packed_row_do_not_attend_to_each_other():
    one, two = batch_flops(HYBRID, [9], []), batch_flops(HYBRID, [4, 5], [])
    # Keys seen: 45 in one document of 9; 10 + 15 in documents of 4 and 5; three times 2 x 2 x 5 FLOPs each.
    assert one.text - two.text == 3 * 20 * (45 - 25)
    assert one.vision == 0


def test_twice_the_images_cost_twice_the_vision_flops_and_no_more_text():
    one, two = batch_flops(HYBRID, [9], [16]), batch_flops(HYBRID, [9], [16, 16])
    assert one.vision == 3 * 16 * (2 * PATCH_WEIGHTS + 4 * 4 * 16)
    assert two.vision == 2 * one.vision and two.text == one.text
    # An image of 32 patches attends to more than two of 16.
    assert batch_flops(HYBRID, [9], [32]).vision > two.vision


def test_lora_pays_no_weight_gradient_of_frozen_weights():
    tuning = Tuning(kind="lora", rank=2)
    flops = training_flops(HYBRID, 9, tuning)
    assert flops["dense MLP"] == 2 * (2 * 2 * MLP_WEIGHTS)
    assert flops["linear attention recurrence"] == 3 * RECURRENCE
    assert flops["full attention scores"] == 3 * 100
    # Rank 2 times inputs + outputs. Linear: q, k, v 14 each, decay 12 and 6, beta 11, gate 14, output 14. Full: q 16,
    # latent 14, keys 7, values 7, output 14. Two MLPs: 30 for each of 3.
    entries = 2 * ((3 * 14 + 12 + 6 + 11 + 14 + 14) + (16 + 14 + 7 + 7 + 14) + 2 * 3 * 30)
    assert adapter_forward_flops(HYBRID, tuning) == 2 * entries
    assert flops["adapters"] == 3 * 2 * entries
    # The tower is frozen, and nothing that learns lies before it.
    assert vision_training_flops(HYBRID, 16) == 3 * vision_training_flops(HYBRID, 16, tuning)


def test_expert_adapters_count_for_the_experts_taken_only():
    rank_one = adapter_forward_flops(kimi_k3(), Tuning(kind="lora", rank=0, expert_rank=1))
    assert rank_one == 2 * 92 * 16 * 3 * 6656


def test_a_first_factor_that_experts_share_multiplies_each_row_of_a_token():
    model, tuning = kimi_k3(), Tuning(kind="lora", rank=0, expert_rank=1)
    alone, shared = (
        adapter_forward_flops(model, dataclasses.replace(tuning, has_shared_down=is_shared))
        for is_shared in (False, True)
    )
    assert shared == alone
    # 3 factors of 3,584 or 3,072 inputs in each of 92 layers, once instead of for 896 experts.
    sizes = [
        sum(array.size for array in trained_arrays(model, dataclasses.replace(tuning, has_shared_down=is_shared)))
        for is_shared in (False, True)
    ]
    assert sizes[0] - sizes[1] == 92 * 895 * (3584 + 3584 + 3072)


def test_an_indexer_reads_detached_inputs():
    """Trained: inputs cost no gradient. Frozen: nothing is computed backward. Adapted: the second factor's inputs."""
    model, row_tokens = kimi_k31(), 8192
    indexer, layers = model.full_attention.indexer, 24
    weights = 1536 * indexer.num_heads * indexer.head_width + model.width * (indexer.head_width + indexer.num_heads)
    scores = indexer.num_heads * indexer.head_width
    seen = 2048 - 2048 * 2047 / (2 * row_tokens)
    forward = layers * 2 * (weights + scores * (row_tokens + 1) / 2)
    assert forward_flops(model, row_tokens)["indexer"] == pytest.approx(forward)
    trained = forward + layers * 2 * weights + 2 * layers * 2 * scores * seen
    assert training_flops(model, row_tokens)["indexer"] == pytest.approx(trained)
    frozen = Tuning(kind="lora", rank=4)
    assert training_flops(model, row_tokens, frozen)["indexer"] == pytest.approx(forward)
    adapted = Tuning(kind="lora", rank=4, adapted=(("indexer", "mixer.indexer.key", layers),))
    flops = training_flops(model, row_tokens, adapted)
    assert flops["indexer"] == pytest.approx(forward + 2 * layers * 2 * scores * seen)
    down, up = model.width * 4, 4 * indexer.head_width
    assert flops["adapters"] == layers * (2 * 2 * down + 3 * 2 * up)


def test_adapters_of_a_tower_count_for_its_patches():
    tuning = Tuning(kind="lora", rank=2, adapted=(("vision", "up", 1), ("projector", "projector.down", 1)))
    # Rank 2 times inputs and outputs of 8 x 16, and of 32 x 10 for four patches.
    entries = 2 * (8 + 16) + 2 * (32 + 10) / 4
    assert vision_training_flops(HYBRID, 16, tuning) == 2 * vision_forward_flops(HYBRID, 16) + 3 * 2 * entries


def test_mfu_by_hand():
    # 8 devices of 100 FLOP/s could do 1,600 in 2 s; 400 were needed.
    assert model_flops_utilisation(400, 2.0, 8, 100) == 0.25


def test_golden_formula_of_two_branches_by_hand():
    messages = [Message(num_bytes=100, bandwidth=50, hops=2, latency_seconds=0.25, contention=3)]
    # 2 hops of 0.25 s, and twice more the 2 s of its bytes for the two others on the link.
    assert communication_seconds(messages) == 0.5 + 2 * 2
    text = Branch(name="text", forward_flops=600, flops_per_second=100, exchanged_bytes=100, bandwidth=50)
    image = Branch(
        name="image",
        forward_flops=200,
        flops_per_second=100,
        exchanged_bytes=100,
        bandwidth=50,
        communication_seconds=communication_seconds(messages),
    )
    cost = golden_cost([text, image], alpha=1.0, beta=0.5, alignment_seconds=3.0)
    assert [terms.total for terms in cost.branches] == [6 + 2, 2 + 2 + 4.5]
    assert cost.slowest.name == "image"
    assert cost.total == 8.5 + 1.5
    # Without contention the text decides.
    assert golden_cost([text, image], alpha=0.0).slowest.name == "text"


def test_alignment_penalty_is_the_mean_offset_by_trapezoids():
    # Offsets 0, 1, 4 at progress 0, 1/2, 1: (0 + 1) / 2 / 2 + (1 + 4) / 2 / 2.
    assert alignment_penalty({"text": [1, 2, 3], "image": [1, 3, 7]}) == 1.5
    assert alignment_penalty({"text": [1, 2, 3]}) == 0
    assert alignment_penalty({"text": [1], "image": [4]}) == 3
    with pytest.raises(ConfigurationError, match="same number"):
        alignment_penalty({"text": [1, 2], "image": [1]})


def test_compute_entropy_by_hand():
    assert compute_entropy(semantic_bits=12, flops=3, redundancy=2) == 2
    with pytest.raises(ConfigurationError, match="at least 1"):
        compute_entropy(12, 3, redundancy=0.5)


def test_a_model_without_tower_costs_no_vision_flops():
    assert batch_flops(dataclasses.replace(HYBRID, vision=VisionConfig(num_layers=0)), [9], [16]).vision == 0


@pytest.mark.parametrize("model", [smollm2_135m(), qwen3_next_80b(), deepseek_v32(), glm53_flash_text()])
def test_projections_cost_two_flops_for_each_entry_of_their_matrices(model):
    flops, sizes = forward_flops(model, 64), Counter()
    for array in parameter_arrays(model):
        if len(array.shape) > 1 and array.name != "decay_bias":
            sizes[array.part] += array.size
    assert flops["linear attention projections"] == 2 * sizes["linear attention"]
    assert flops["full attention projections"] == 2 * sizes["full attention"]
    assert flops["shared experts"] == 2 * sizes["shared experts"]
    assert flops["dense MLP"] == 2 * sizes["dense MLP"]
    # Streams are read, mixed and written besides.
    assert (flops["hyper connections"] > 2 * sizes["norms and mixes"]) == (model.residual == "hyper")


@pytest.mark.parametrize(
    ("changes", "weights", "layers", "keys"),
    [
        # Two of three layers run, on 2 x 3 patches and the class token; a projector 16 -> 10 -> 10 reads two depths.
        (
            {"kind": "clip", "num_layers": 3, "feature_depths": (2, 0), "table_rows": 2, "table_columns": 3},
            32 + 2 * (128 + 256) + 160 + 100,
            2,
            7,
        ),
        # Patches of two frames; two mergers of four patches.
        (
            {"kind": "qwen3_vl", "deep_layers": (0,), "frames_per_patch": 2},
            64 + 128 + 256 + 2 * (1024 + 320) / 4,
            1,
            16,
        ),
        ({"kind": "fuyu"}, 4 * 10, 0, 0),
    ],
    ids=["clip", "qwen3_vl", "fuyu"],
)
def test_flops_of_a_patch_in_other_towers_by_hand(changes, weights, layers, keys):
    model = dataclasses.replace(HYBRID, vision=dataclasses.replace(HYBRID.vision, **changes))
    # One head of 4: 2 FLOPs for each of 4 entries of a key, and of its value.
    assert vision_forward_flops(model, 16) == 2 * weights + layers * 4 * 4 * keys


def test_a_dense_mlp_without_a_gate_has_two_matrices():
    plain = dataclasses.replace(HYBRID, dense_mlp="relu_squared")
    assert forward_flops(plain, 9)["dense MLP"] == 2 * 2 * 2 * 10 * 20
