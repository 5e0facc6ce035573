"""FLOPs of steps that train parts of a model, by hand."""

import dataclasses

import pytest

from mmjax.config import (
    AudioConfig,
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)
from mmjax.models.multimodal import define
from mmjax.planner.cost import (
    audio_forward_flops,
    audio_training_flops,
    forward_flops,
    training_flops,
    vision_forward_flops,
    vision_training_flops,
)
from mmjax.training.trained_flops import clip_flops, patch_flops, token_flops

# A linear layer with a dense MLP, a full one with experts, a linear one with experts.
MODEL = ModelConfig(
    width=10,
    num_layers=3,
    vocabulary_size=100,
    full_attention_layers=(1,),
    residual_block_layers=1,
    linear_attention=LinearAttentionConfig(
        num_heads=1, key_width=4, value_width=4, convolution_width=4, decay_rank=2, chunk_tokens=8
    ),
    full_attention=FullAttentionConfig(
        num_heads=2, query_rank=0, latent_width=3, nope_width=2, shared_key_width=1, value_width=2, output_gate="none"
    ),
    moe=MoeConfig(
        num_dense_layers=1,
        dense_width=20,
        num_experts=4,
        experts_per_token=2,
        expert_width=5,
        latent_width=0,
        latent_norm=False,
        num_shared_experts=1,
    ),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=4, hidden_width=16, patch_pixels=2, channels=1),
    audio=AudioConfig(num_layers=1, clip_frames=100),
)
# q, k, v; their taps; beta; decay; gate; output.
LINEAR = 2 * (3 * 40 + 4 * 12 + 10 + (20 + 8) + 40 + 40)
RECURRENCE = 6 * 16 + 8 * 12 + 64
# q; latent; keys and values from it; output.
FULL = 2 * (10 * 6 + 10 * 4 + 3 * 2 * (2 + 2) + 4 * 10)
# 2 heads, keys of 3 and values of 2, and on average 5 of 9 keys.
SCORES = 2 * 2 * (3 + 2) * 5
DENSE = 2 * 3 * 10 * 20
ROUTER, ROUTED, SHARED = 2 * 10 * 4, 2 * 2 * 3 * 10 * 5, 2 * 3 * 10 * 5
MIXTURE = ROUTER + ROUTED + SHARED
HEAD = 2 * 10 * 100
# Sources of the mixes: the embedding; then what each block has added, and before the head all of them.
MIXES = [6 * 10 * number for number in (1, 2, 2, 3, 3, 4, 4)]
FORWARD = 2 * (LINEAR + RECURRENCE) + FULL + SCORES + DENSE + 2 * MIXTURE + HEAD + sum(MIXES)


def flops_where(is_trained, model=MODEL) -> float:
    return token_flops(model, 9, [path for path in define(model).parameters if is_trained(path)])


def test_a_model_trained_whole_costs_three_times_its_forward_pass():
    assert sum(forward_flops(MODEL, 9).values()) == FORWARD
    assert flops_where(lambda path: True) == 3 * FORWARD
    assert flops_where(lambda path: False) == FORWARD


def test_backward_passes_end_at_the_first_trained_block_and_frozen_weights_cost_no_gradient():
    assert flops_where(lambda path: path == "decoder.head") == FORWARD + HEAD
    assert flops_where(lambda path: path == "decoder.norm") == FORWARD + HEAD + 2 * MIXES[6]
    # A projector's gradients come through all of the decoder.
    weightless = 2 * RECURRENCE + SCORES + sum(MIXES)
    of_inputs = FORWARD + weightless
    assert flops_where(lambda path: path.startswith("projector")) == FORWARD + of_inputs
    assert flops_where(lambda path: path == "decoder.embedding") == FORWARD + of_inputs
    # The experts of the last layer, and those of both layers that have some.
    experts = ("mlp.gate", "mlp.up", "mlp.down")
    last = "decoder.segments.2.layers.0."
    assert {path for path in define(MODEL).parameters if path.startswith(last)}
    expected = FORWARD + ROUTED + MIXTURE + HEAD + 2 * sum(MIXES[5:])
    assert flops_where(lambda path: path.startswith(last) and path.endswith(experts)) == expected
    behind = 2 * MIXTURE + LINEAR + 2 * RECURRENCE + HEAD + 2 * sum(MIXES[3:])
    moe = lambda path: path.endswith(experts) and not path.startswith("decoder.segments.0.")  # noqa: E731
    assert flops_where(moe) == FORWARD + 2 * ROUTED + behind


def test_a_tied_head_is_trained_with_the_embedding():
    tied = dataclasses.replace(MODEL, tied_head=True)
    whole, alone = flops_where(lambda path: True, tied), flops_where(lambda path: path == "decoder.embedding", tied)
    assert whole == 3 * FORWARD
    assert alone == FORWARD + FORWARD + 2 * RECURRENCE + SCORES + sum(MIXES) + HEAD


def test_an_indexer_learns_alone():
    indexer = IndexerConfig(stage="dense", num_heads=2, head_width=4)
    model = dataclasses.replace(
        MODEL, full_attention=dataclasses.replace(MODEL.full_attention, indexer=indexer), residual="plain"
    )
    forward = forward_flops(model, 9)
    alone = flops_where(lambda path: ".indexer." in path, model)
    learning = training_flops(model, 9)["indexer"] - forward["indexer"]
    assert learning > 0 and alone == sum(forward.values()) + learning


def test_towers_and_their_projectors():
    projector = 2 * (32 * 32 + 32 * 10) / 4
    forward = vision_forward_flops(MODEL, 16)
    assert patch_flops(MODEL, 16, ["decoder.head"]) == forward
    assert patch_flops(MODEL, 16, ["projector.down"]) == forward + 2 * projector
    assert patch_flops(MODEL, 16, ["vision.position_table"]) == 3 * forward - projector
    assert patch_flops(MODEL, 16, ["vision.position_table", "projector.down"]) == vision_training_flops(MODEL, 16)
    audio = MODEL.audio
    joined = audio.values_per_feature * audio.width
    projector = 2 * audio.clip_features * audio.projector_width * (joined + 10)
    forward = audio_forward_flops(MODEL)
    assert clip_flops(MODEL, ["decoder.head"]) == forward
    assert clip_flops(MODEL, ["audio_projector.down"]) == forward + 2 * projector
    assert clip_flops(MODEL, ["audio.norm", "audio_projector.down"]) == audio_training_flops(MODEL)
    assert clip_flops(dataclasses.replace(MODEL, audio=AudioConfig()), ["decoder.head"]) == pytest.approx(0)
