"""Frames of animated files: capped before decoding, fitted in time, pooled by the tower, equal to what they show."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest

from mmjax.config import DataConfig, LengthConfig, ModelConfig, VisionConfig
from mmjax.data import images, videos
from mmjax.data.align import Clip
from mmjax.data.batch import Batch
from mmjax.data.loader import Loader
from mmjax.data.sources.conversation import VideoFile
from mmjax.errors import DataError

VISION = VisionConfig(patch_pixels=4, table_rows=4, table_columns=4)
MODEL = ModelConfig(num_layers=4, full_attention_layers=(3,), vision=VISION)


def write(path: Path, num_frames: int, size: tuple[int, int] = (8, 8), milliseconds: int = 40) -> None:
    """Grey frames, each lighter than the one before."""
    frames = [PIL.Image.fromarray(np.full(size, 10 + 4 * number, np.uint8)) for number in range(num_frames)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, lossless=True)


def load(folder: Path, names: list[str], record: dict | None = None, **changes) -> Loader:
    turns = [{"from": "human", "value": "<video>" * len(names) + "?"}, {"from": "gpt", "value": "yes"}]
    (folder / "d.jsonl").write_text(json.dumps(record or {"conversations": turns, "videos": names}) + "\n")
    vision = changes.pop("vision", VISION)
    settings = {"rows": 1, "row_tokens": 128, "row_patches": 512, "image_max_patches": 64} | changes
    return Loader(DataConfig(source=str(folder / "d.jsonl"), **settings), vision, 0, model=MODEL)


@pytest.mark.parametrize("ending", ["webp", "png"])
def test_frames_go_to_the_tower_in_clips_whose_features_are_shared(ending, tmp_path):
    write(tmp_path / f"a.{ending}", 10, size=(8, 16))
    batch = load(tmp_path, [f"a.{ending}"]).batch(0)
    # Ten frames are clips of 4, 4 and 2; a frame of 8 x 16 pixels is 2 x 4 patches, two features.
    assert (batch.feature_index[0] >= 0).sum() == 3 * 2 and batch.patch_segment_ids.max() == 3
    for clip, frames in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]), 1):
        here = batch.patch_segment_ids[0] == clip
        assert here.sum() == 8 * len(frames)
        shown = np.rint((batch.patches[0][here].mean(axis=1) + 1) * 127.5).reshape(len(frames), 8)
        assert shown.tolist() == [[10 + 4 * frame] * 8 for frame in frames]
        assert batch.patch_position[0][here][::8, 0].tolist() == list(range(len(frames)))
        assert set(map(tuple, batch.patch_grid[0][here].tolist())) == {(len(frames), 2, 4)}
        windows = batch.patch_feature[0][here[::4]].reshape(len(frames), 2)
        assert np.all(windows == windows[0]) and windows[0, 1] == windows[0, 0] + 1
    placed = batch.feature_index[0][batch.feature_index[0] >= 0]
    assert placed.tolist() == sorted(set(batch.patch_feature[0][batch.patch_feature[0] >= 0].tolist()))


def test_a_clip_of_equal_frames_has_the_features_of_its_picture_but_for_the_time_table(tmp_path):
    from mmjax.models.vision import merge_windows

    write(tmp_path / "a.png", 4)
    batch = load(tmp_path, ["a.png"]).batch(0)
    hidden = np.random.default_rng(0).normal(size=(1, 4, 6)).astype(np.float32)
    frames = np.zeros((1, 512, 6), np.float32)
    frames[:, :16] = np.tile(hidden, (1, 4, 1))
    merged = jax.jit(merge_windows)(frames, batch.patch_grid, batch.patch_feature)
    np.testing.assert_allclose(merged[0, 0], hidden.reshape(-1), rtol=1e-6)
    assert not np.any(merged[0, 1:])


@pytest.mark.parametrize(
    ("rule", "num_frames"),
    [
        (LengthConfig(length=0), 12),
        (LengthConfig(length=6, longer="truncate"), 6),
        (LengthConfig(length=6, longer="mean"), 6),
        (LengthConfig(length=64, shorter="pad"), 12),
        (LengthConfig(length=64, shorter="bilinear"), 24),
    ],
)
def test_frames_are_fitted_in_time_and_padding_never_reaches_the_model(rule, num_frames, tmp_path):
    write(tmp_path / "a.webp", 12)
    data = DataConfig(video=rule)
    video = VideoFile(where="here", root=tmp_path, path="a.webp")
    assert videos.read_shape(video, data) == videos.VideoShape(8, 8, num_frames)
    frames = videos.read_frames(video, data, 3)
    assert frames.shape == (num_frames, 8, 8, 3) and frames.dtype == np.uint8
    levels = frames[:, 0, 0, 0].tolist()
    assert levels == sorted(levels) and 10 <= levels[0] <= 13 and levels[-1] <= 54
    if rule.longer == "mean" and rule.length == 6:
        assert levels == [12 + 8 * number for number in range(6)]
    loader = load(tmp_path, ["a.webp"], video=rule, row_patches=512)
    assert loader._sizes[0].tolist()[1] == 4 * num_frames


def test_videos_are_named_as_pictures_are_and_mixed_with_them(tmp_path):
    write(tmp_path / "a.webp", 3)
    PIL.Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "b.png")
    user = {"role": "user", "content": "<image><video>?"}
    answer = {"role": "assistant", "content": "yes"}
    marked = {"messages": [user, answer], "images": ["b.png"], "video": "a.webp"}
    parts = [{"type": "image", "path": "b.png"}, {"type": "video", "video": "a.webp"}, {"type": "text", "text": "?"}]
    listed = {"messages": [{"role": "user", "content": parts}, answer]}
    batches = [load(tmp_path, [], record).batch(0) for record in (marked, listed)]
    for name, one, other in zip(Batch._fields, *batches, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    assert batches[0].patch_segment_ids.max() == 2 and (batches[0].feature_index >= 0).sum() == 2
    with pytest.raises(DataError, match="1 video markers and 2 videos"):
        load(tmp_path, [], {**marked, "video": ["a.webp", "a.webp"]})
    plain = {"messages": [{"role": "user", "content": "a <video> tag"}, answer]}
    assert (load(tmp_path, [], plain).batch(0).feature_index >= 0).sum() == 0


def test_a_video_too_long_too_large_or_broken_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    write(tmp_path / "a.webp", 12, milliseconds=500)
    write(tmp_path / "c.png", 12, milliseconds=500)
    write(tmp_path / "b.png", 12)
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gif").write_bytes(b"GIF89a")
    for name, changes in (
        ("a.webp", {"video_max_frames": 11}),
        ("a.webp", {"video_max_seconds": 5.0}),
        ("c.png", {"video_max_seconds": 5.0}),
    ):
        with pytest.raises(DataError, match=rf"line 1, video '{name}': found more than"):
            load(tmp_path, [name], **changes).batch(0)
    with monkeypatch.context() as patch:
        patch.setattr(images, "MAX_VIDEO_PIXELS", 500)
        with pytest.raises(DataError, match="more than 500 pixels in all frames"):
            load(tmp_path, ["a.webp"])
    for name in ("cut.png", "text.gif", "missing.gif", "../a.webp"):
        with pytest.raises(DataError, match="line 1, video"):
            load(tmp_path, [name]).batch(0)
    for vision in (VisionConfig(num_layers=0), dataclasses.replace(VISION, kind="clip", feature_depths=(1,))):
        with pytest.raises(DataError, match="found a video for a model with"):
            load(tmp_path, ["a.webp"], vision=vision)


def test_clips_are_decoded_once_a_video(tmp_path, monkeypatch):
    write(tmp_path / "a.webp", 12)
    loader, count, read_frames = load(tmp_path, ["a.webp"]), [], videos.read_frames
    monkeypatch.setattr(videos, "read_frames", lambda *options: count.append(1) or read_frames(*options))
    [(document, patches, _)] = loader.read_row(loader.planned_rows(0)[0], 0)
    assert len(count) == 1 and len(patches) == 48
    assert all(isinstance(placed.picture, Clip) for placed in document.pictures)


@pytest.mark.parametrize("policy", ["drop_image", "truncate"])
def test_a_video_too_long_for_a_row_goes_whole_and_leaves_what_is_before_it(policy, tmp_path):
    write(tmp_path / "a.png", 4)
    write(tmp_path / "b.png", 12)
    turns = [{"from": "human", "value": "<video>?"}, {"from": "gpt", "value": "yes"}]
    turns += [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "no"}]
    record = {"conversations": turns, "videos": ["a.png", "b.png"]}
    # A clip of four frames takes 16 patches: one of the first video and two of the second's three would fit.
    batch = load(tmp_path, [], record, too_long=policy, row_patches=48).batch(0)
    assert (batch.feature_index[0] >= 0).sum() == 1 and batch.patch_segment_ids.max() == 1
    assert batch.loss_weight.sum() == {"drop_image": len("yes") + len("no") + 2, "truncate": len("yes") + 1}[policy]
