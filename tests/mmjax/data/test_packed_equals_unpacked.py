"""What the loader packs trains as its samples would alone: loss, every gradient, and what routers count."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest

from mmjax.config import (
    AudioConfig,
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.data.batch import Batch, supervised_tokens
from mmjax.data.loader import Loader
from mmjax.data.packing import PackedDocument, fill
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, make_value_and_gradient, place_batch

soundfile = pytest.importorskip("soundfile")

MODEL = ModelConfig(
    width=16,
    num_layers=2,
    vocabulary_size=320,
    full_attention_layers=(1,),
    residual_block_layers=1,
    linear_attention=LinearAttentionConfig(num_heads=1, key_width=4, value_width=4, decay_rank=4, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=1,
        query_rank=8,
        latent_width=8,
        nope_width=4,
        shared_key_width=4,
        value_width=4,
        query_chunk_tokens=16,
    ),
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=1),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, patch_pixels=2),
    audio=AudioConfig(
        num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, mel_bins=6, clip_frames=20, projector_width=8
    ),
    remat="none",
)
# Two devices: whatever a sample alone needs, one of them has neither text nor pictures.
MESH = MeshConfig(expert=2)
# (pictures of the first turn, of the second; answers): text alone, one, two and three pictures, and several turns.
SAMPLES = [((0,), 3), ((1,), 2), ((2,), 9), ((3,), 1), ((0, 0), 4), ((1, 2), 5), ((0, 1), 2), ((0,), 12)]
# Seconds of the sounds or signals of some samples, asked about in their last turn; a clip is 0.2 s, two features.
SOUNDS = {3: (0.15,), 5: (0.05, 0.35), 7: (0.2,)}
TOWER = ("vision.", "projector.")
HEARING = ("audio.", "audio_projector.")


def write(folder: Path, kind: str) -> str:
    random = np.random.default_rng(0)
    lines = []
    for number, (pictures, answer) in enumerate(SAMPLES):
        turns, names = [], []
        for turn, count in enumerate(pictures):
            for picture in range(count):
                names.append(f"{number}-{turn}-{picture}.png")
                side = random.integers(2, 11, 2)
                PIL.Image.fromarray(random.integers(0, 256, (*side, 3), np.uint8)).save(folder / names[-1])
            turns.append({"role": "user", "content": "<image>" * count + f"q{number}"})
            turns.append({"role": "assistant", "content": "abcdefghijklm"[:answer]})
        heard = [f"{number}-{sound}.{kind}" for sound in range(len(SOUNDS.get(number, ())))]
        for name, seconds in zip(heard, SOUNDS.get(number, ()), strict=True):
            noise, shape = random.normal(size=round(16_000 * seconds)), (MODEL.audio.mel_bins, round(100 * seconds))
            if kind == "wav":
                soundfile.write(folder / name, 0.3 * noise, 16_000)
            else:
                np.save(folder / name, noise[: shape[0] * shape[1]].reshape(shape))
        marker = "audio" if kind == "wav" else "signal"
        turns[-2]["content"] += f"<{marker}>" * len(heard)
        lines.append(json.dumps({"messages": turns, "images": names, f"{marker}s": heard}) + "\n")
    (folder / "d.jsonl").write_text("".join(lines))
    return str(folder / "d.jsonl")


@pytest.fixture(
    scope="module", params=["float64 sounds", "float32 signals", pytest.param("float32 sounds", marks=pytest.mark.slow)]
)
def numbers(request, tmp_path_factory):
    """(results of a batch, its loader) in a precision; one compilation for all batches."""
    dtype, hears = request.param.split()
    audio = dataclasses.replace(MODEL.audio, hears=hears)
    model = dataclasses.replace(MODEL, audio=audio, parameter_dtype=dtype, compute_dtype=dtype)
    data = DataConfig(
        source=write(tmp_path_factory.mktemp("records"), "wav" if hears == "sounds" else "npy"),
        rows=4,
        row_tokens=48,
        row_patches=64,
        image_max_patches=36,
        row_clips=3,
    )
    config = RunConfig(model=model, data=data, mesh=MESH)
    mesh = make_mesh(MESH)
    loader = Loader(data, model.vision, 0, model=model)
    with jax.enable_x64(dtype == "float64"):
        state, random = abstract_state(config, mesh), np.random.default_rng(0)
        arrays = jax.tree.map(
            lambda leaf: jax.device_put(random.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), leaf.sharding),
            (state.parameters, state.router_biases),
        )
        program = jax.jit(make_value_and_gradient(config, mesh))

        def run(batch: Batch):
            return jax.device_get(program(*arrays, place_batch(batch, mesh)))

        yield run, loader, 1e-9 if dtype == "float64" else 1e-4


def alone(loader: Loader, number: int, row: int = 0) -> Batch:
    packed = loader._read(number, 0)
    assert packed is not None
    rows = [[], [], [], []]
    rows[row].append(packed)
    return fill(rows, loader._data, loader._vision, loader.tokenizer.pad_token_id, audio=MODEL.audio)


def check_mean(run, batch: Batch, parts: list[Batch], tolerance: float) -> None:
    """Loss and gradients of a batch are the means over its parts, by their supervised tokens."""
    loss, report, counts, gradients = run(batch)
    results = [run(part) for part in parts]
    weights = [supervised_tokens(part) for part in parts]
    assert sum(weights) == supervised_tokens(batch) == counts["supervised_tokens"] > 0
    expected = sum(result[0] * weight for result, weight in zip(results, weights, strict=True)) / sum(weights)
    assert abs(loss - expected) <= tolerance * abs(expected)
    for name, gradient in gradients.items():
        mean = sum(result[3][name] * weight for result, weight in zip(results, weights, strict=True)) / sum(weights)
        assert np.all(np.isfinite(gradient)) and np.abs(gradient - mean).max() <= tolerance * np.abs(mean).max(), name
    for name, router in report.routers.items():
        assert np.array_equal(router.load, sum(result[1].routers[name].load for result in results)), name


def test_a_packed_batch_is_the_mean_of_its_samples(numbers):
    run, loader, tolerance = numbers
    batch = loader.batch(0)
    held = sorted(number for row in loader.planned_rows(0) for number in row)
    assert held[: len(SAMPLES)] == list(range(len(SAMPLES))) and batch.segment_ids.max() > 1
    hand_count = sum(len(pictures) * (answer + 1) for pictures, answer in (SAMPLES[number] for number in held))
    assert supervised_tokens(batch) == hand_count
    check_mean(run, batch, [alone(loader, number) for number in held], tolerance)


def only(loader: Loader, numbers: list[list[int]]) -> Batch:
    rows = [[packed for number in row if (packed := loader._read(number, 0))] for row in numbers]
    return fill(rows, loader._data, loader._vision, loader.tokenizer.pad_token_id, audio=MODEL.audio)


@pytest.mark.parametrize("rows", [[[0, 4], [], [], []], [[1], [2], [3], [6]], [[0], [4], [1], [5]]])
def test_batches_of_text_of_media_and_with_media_on_one_device_alone_give_the_same_gradients(rows, numbers):
    run, loader, tolerance = numbers
    batch = only(loader, rows)
    check_mean(run, batch, [alone(loader, number) for row in rows for number in row], tolerance)
    _, _, _, gradients = run(batch)
    for names, index in ((TOWER, batch.feature_index), (HEARING, batch.sound_index)):
        tower = [gradient for name, gradient in gradients.items() if name.startswith(names)]
        assert tower and any(np.any(gradient) for gradient in tower) == bool((index >= 0).any())


def test_where_a_sample_stands_does_not_matter(numbers):
    run, loader, tolerance = numbers
    (first, _, _, one), (last, _, _, other) = (run(alone(loader, 5, row)) for row in (0, 3))
    assert abs(first - last) <= tolerance * abs(first)
    for name, gradient in one.items():
        assert np.abs(gradient - other[name]).max() <= tolerance * max(np.abs(gradient).max(), 1e-30), name


def test_swapping_two_pictures_of_a_sample_changes_that_sample_only(numbers):
    run, loader, _ = numbers
    batch = only(loader, [[2], [1], [], []])
    document, patches, _ = loader._read(2, 0)
    sizes = [placed.num_patches for placed in document.pictures]
    other = dataclasses.replace(document, pictures=document.pictures[::-1])
    swapped = np.concatenate([patches[sizes[0] :], patches[: sizes[0]]])
    rows = [[PackedDocument(other, swapped)], [loader._read(1, 0)], [], []]
    changed = fill(rows, loader._data, loader._vision, loader.tokenizer.pad_token_id, audio=MODEL.audio)
    assert abs(run(changed)[0] - run(batch)[0]) > 1e-9
    np.testing.assert_array_equal(changed.patches[1], batch.patches[1])
    for field, one, two in zip(Batch._fields, batch, changed, strict=True):
        if not field.startswith("patch"):
            np.testing.assert_array_equal(one, two, err_msg=field)
