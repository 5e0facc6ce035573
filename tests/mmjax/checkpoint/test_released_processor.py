"""How a release prepares its pictures reaches training and generation, or is refused by the name of the field."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mmjax import convert, generate, train
from mmjax.checkpoint.released_processor import with_processor
from mmjax.checkpoint.weights import read_model
from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.data import align
from mmjax.data.align import place
from mmjax.data.images import read_pixels as read_picture
from mmjax.data.picture_layout import cut, lay_out
from mmjax.data.prompts import TrainingForm, prompt_batch
from mmjax.data.sources.conversation import ImageFile, Message, Sample
from mmjax.data.tokenizer import open_tokenizer
from mmjax.errors import CheckpointError
from mmjax.training import loop

SIDE = 56
MEAN, DEVIATION = [0.1, 0.2, 0.6], [0.3, 0.25, 0.7]
TOWERS = {
    "moonvit": VisionConfig(kind="moonvit", patch_pixels=14),
    "clip": VisionConfig(kind="clip", patch_pixels=14, table_rows=4, table_columns=4, feature_depths=(1,)),
    "qwen3_vl": VisionConfig(kind="qwen3_vl", patch_pixels=16, frames_per_patch=2),
    "fuyu": VisionConfig(kind="fuyu", patch_pixels=30),
}


def prepared(folder: Path, kind: str, settings: dict, file: str = "preprocessor_config.json") -> VisionConfig:
    """The tower of that kind, with what a release of these settings says."""
    (folder / file).write_text(json.dumps(settings))
    return with_processor(folder, ModelConfig(vision=TOWERS[kind])).vision


def random_picture(height: int = 70, width: int = 90) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def pil_processor(module: str, name: str, **settings):
    """The variant of a processor that resizes with Pillow, as ours does."""
    found = pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name)(**settings)


@pytest.mark.parametrize(
    "more", [{}, {"rescale_factor": 1 / 127}, {"do_rescale": False}, {"do_normalize": False}], ids=str
)
def test_clip_sees_the_statistics_of_the_release(tmp_path, more):
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = pil_processor("clip", "CLIPImageProcessorPil", image_mean=MEAN, image_std=DEVIATION, **sizes, **more)
    picture = random_picture()
    theirs = processor(picture, return_tensors="np")["pixel_values"][0]
    vision = prepared(tmp_path, "clip", json.loads(processor.to_json_string()))
    patches = cut(picture, lay_out(*picture.shape[:2], vision, 10**6), vision)[1:]
    ours = patches.reshape(4, 4, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, SIDE, SIDE)
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("limits", [(20_000, 400_000), (1024, 3072)])
def test_qwen_sees_the_statistics_and_the_limits_of_the_release(tmp_path, limits):
    processor = pil_processor(
        "qwen2_vl",
        "Qwen2VLImageProcessorPil",
        patch_size=16,
        image_mean=MEAN,
        image_std=DEVIATION,
        size=dict(zip(("shortest_edge", "longest_edge"), limits, strict=True)),
    )
    picture = random_picture()
    theirs = processor(picture, return_tensors="np")
    nested = {"image_processor": json.loads(processor.to_json_string()), "processor_class": "Qwen3VLProcessor"}
    vision = prepared(tmp_path, "qwen3_vl", nested, "processor_config.json")
    layout = lay_out(*picture.shape[:2], vision, 10**6)
    assert (1, *layout.grid[0, 1:]) == tuple(theirs["image_grid_thw"][0])
    assert np.abs(cut(picture, layout, vision) - theirs["pixel_values"]).max() < 1e-5


def test_the_numbers_of_the_released_processors_change_nothing(tmp_path):
    half = {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 255}
    files = {
        "moonvit": {"media_proc_cfg": half | {"patch_size": 14, "merge_kernel_size": 2}},
        "qwen3_vl": half | {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "temporal_patch_size": 2},
        "fuyu": half | {"size": {"height": 1080, "width": 1920}, "padding_value": 1.0, "resample": 2},
    }
    for kind, settings in files.items():
        assert prepared(tmp_path, kind, settings) == TOWERS[kind], kind


def test_a_limit_of_patches_shrinks_kimis_pictures(tmp_path):
    vision = prepared(tmp_path, "moonvit", {"media_proc_cfg": {"in_patch_limit": 8}})
    assert lay_out(70, 90, vision, 10**6).num_patches == lay_out(70, 90, TOWERS["moonvit"], 8).num_patches == 8


# preprocessor_config.json of Kimi-K3.
KIMI_K3 = {
    "in_patch_limit": 65_536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16_384,
    "in_patch_limit_video": None,
    "sample_fps": 8.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def test_kimi_k3s_own_file_lays_transparent_pictures_on_a_chessboard_once_they_are_scaled(tmp_path):
    vision = prepared(tmp_path, "moonvit", {"media_proc_cfg": KIMI_K3, "auto_map": {"AutoProcessor": "k3.Processor"}})
    assert vision == dataclasses.replace(TOWERS["moonvit"], max_pixels=65_536 * 14**2, transparency="chessboard")
    # Left half opaque red, right half a tenth of it; twice as large as the budget of 4 x 8 patches.
    pixels = np.zeros((112, 224, 4), np.uint8)
    pixels[..., 0], pixels[:, :112, 3], pixels[:, 112:, 3] = 200, 255, 26
    PIL.Image.fromarray(pixels).save(tmp_path / "a.png")
    data = DataConfig(image_max_patches=32)
    file = ImageFile(where="here", root=tmp_path, path="a.png")
    placed = place(file, "here", data, vision)
    seen = align.read_pixels(placed, data, vision)
    assert seen.shape == (56, 112, 3) and (seen[:, :50] == (200, 0, 0)).all()
    share = np.float32(26 / 255)
    for row, column, below in ((0, 64, 255), (0, 72, 180), (8, 72, 255), (8, 64, 180)):
        expected = share * np.array([200, 0, 0]) + (1 - share) * below
        assert np.abs(seen[row : row + 8, column : column + 8] - expected).max() < 1.5
    patches = cut(read_picture(file, max_pixels=10**6, channels=3, keeps_alpha=True), placed.layout, vision)
    normal = seen.astype(np.float32) / 127.5 - 1
    np.testing.assert_allclose(patches[0], normal[:14, :14].transpose(2, 0, 1).reshape(-1), atol=1e-6)
    # Elsewhere on white, before they are scaled.
    white = align.read_pixels(placed, data, TOWERS["moonvit"])
    assert np.abs(white[:, 62:] - (share * np.array([200, 0, 0]) + (1 - share) * 255)).max() < 1.5


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("moonvit", "patch_limit_on_one_side", 256),
        ("moonvit", "fixed_output_tokens", 64),
        ("moonvit", "transparent_bg_config", KIMI_K3["transparent_bg_config"] | {"chessboard_square_size": 16}),
        ("clip", "do_center_crop", False),
        ("clip", "do_pad", True),
        ("clip", "size", {"shortest_edge": 224}),
        ("clip", "crop_size", {"height": 48, "width": 56}),
        ("clip", "resample", 2),
        ("clip", "image_mean", [0.5, 0.5]),
        ("clip", "image_grid_pinpoints", [[56, 112]]),
        ("clip", "rescale_factor", 0),
        ("qwen3_vl", "do_resize", False),
        ("qwen3_vl", "patch_size", 14),
        ("qwen3_vl", "merge_size", 4),
        ("qwen3_vl", "temporal_patch_size", 1),
        ("qwen3_vl", "max_pixels", "many"),
        ("moonvit", "do_convert_rgb", False),
        ("moonvit", "size", {"max_height": 128, "max_width": 128}),
        ("fuyu", "size", {"height": 600, "width": 800}),
        ("fuyu", "padding_value", 0.0),
        ("fuyu", "do_sharpen", True),
    ],
)
def test_a_field_that_asks_for_another_preparation_is_named(tmp_path, kind, field, value):
    with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {field}"):
        prepared(tmp_path, kind, {field: value})


def test_limits_that_differ_and_a_chessboard_that_is_scaled_are_named(tmp_path):
    same = {"in_patch_limit": 64, "in_token_limit": 64}
    assert prepared(tmp_path, "moonvit", same).max_pixels == 64 * 14**2
    for change, field in (
        (same | {"in_token_limit": 32}, "in_token_limit"),
        (KIMI_K3 | {"transparent_bg_fill_stage": "before_resize"}, "transparent_bg_fill_stage"),
    ):
        with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {field}"):
            prepared(tmp_path, "moonvit", {"media_proc_cfg": change})


def test_statistics_of_a_release_reach_training_and_generation(tmp_path, releases):
    config = releases.k3_config()
    config["text_config"]["vocab_size"] = 264
    source = releases.write(tmp_path / "source", config, releases.random_tensors(config, np.float32))
    settings = {"media_proc_cfg": {"image_mean": MEAN, "image_std": DEVIATION, "in_patch_limit": 4096}}
    (source / "preprocessor_config.json").write_text(json.dumps(settings))
    folder = tmp_path / "ours"
    assert convert.main([str(source), str(folder)]) == 0
    assert read_model(folder).vision.pixel_mean == tuple(MEAN)

    color = (200, 100, 50)
    expected = [(value / 255 - mean) / spread for value, mean, spread in zip(color, MEAN, DEVIATION, strict=True)]
    PIL.Image.new("RGB", (12, 12), color).save(tmp_path / "picture.png")
    talk = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk, "images": ["picture.png"]}) + "\n")
    options = ["--data.source", str(tmp_path / "talks.jsonl"), "--data.rows", "1", "--data.row-patches", "4"]
    options += ["--data.image-max-patches", "4", "--run-dir", str(tmp_path / "run")]
    command = train.read_command(["--weights", str(folder), *options])
    run = dataclasses.replace(command.settings, data=dataclasses.replace(command.settings.data, packing_window=1))
    Path(run.run_dir).mkdir()
    trained = loop.open_loader(run).batch(0)

    asked = generate.read_settings(generate.Command(checkpoint=str(folder), prompt="?"))
    form = TrainingForm(open_tokenizer(asked.data), asked.data, asked.model.vision, asked.model.audio)
    parts = (np.broadcast_to(np.array(color, np.uint8), (12, 12, 3)), "?")
    sample = Sample(where="here", messages=(Message(role="user", parts=parts, is_supervised=False),))
    shown = prompt_batch(form.chats([sample]), 1, asked.data, asked.model.vision, form.pad_token_id, asked.model.audio)
    for batch in (trained, shown):
        patches = batch.patches[0, batch.patch_segment_ids[0] > 0].reshape(4, 3, -1)
        np.testing.assert_allclose(
            patches, np.broadcast_to(np.array(expected)[None, :, None], patches.shape), rtol=1e-5
        )
