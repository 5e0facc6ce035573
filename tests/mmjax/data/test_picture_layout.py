"""Pictures as patches and placeholders, against the image processors of transformers."""

import dataclasses

import numpy as np
import pytest

from mmjax.config import DataConfig, VisionConfig
from mmjax.data.align import align, read_patches
from mmjax.data.packing import PackedDocument, fill
from mmjax.data.picture_layout import NEWLINE, ORDINARY, cut, lay_out
from mmjax.data.sources.conversation import Message, Sample
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.presets.fuyu import fuyu_8b
from mmjax.presets.llava import NEXT_TILINGS
from mmjax.presets.qwen3_vl import qwen3_vl_4b

transformers = pytest.importorskip("transformers")

CLIP = VisionConfig(kind="clip", patch_pixels=14, table_rows=4, table_columns=4, feature_depths=(1,))
SIDE = 56
TILED = dataclasses.replace(CLIP, newline="learned", tilings=NEXT_TILINGS)
QWEN, FUYU = qwen3_vl_4b().vision, fuyu_8b().vision
# (height, width): larger and smaller than the towers, square and long, one pixel in one direction.
SIZES = [(70, 131), (200, 90), (56, 56), (31, 200), (45, 46), (300, 17)]
ANY = 10**9


def random_picture(height: int, width: int) -> np.ndarray:
    rows, columns = np.indices((height, width))
    waves = np.stack([np.sin(rows / 7), np.cos(columns / 5), np.sin((rows + columns) / 9)], axis=-1)
    noise = np.random.default_rng(height * width).normal(size=(height, width, 3))
    return np.clip(128 + 90 * waves + 30 * noise, 0, 255).astype(np.uint8)


def pil_processor(module: str, name: str, **settings):
    """The variant of a processor that resizes with Pillow, as ours does."""
    found = pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name)(**settings)


def picture_of(patches: np.ndarray, vision: VisionConfig, rows: int, columns: int) -> np.ndarray:
    """[C, rows * p, columns * p] of patches row by row, each the flattened [C, p, p]."""
    side = vision.patch_pixels
    cells = patches.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4)
    return cells.reshape(3, rows * side, columns * side)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_llava_sees_what_its_processor_gives(size):
    picture = random_picture(*size)
    processor = pil_processor(
        "clip", "CLIPImageProcessorPil", size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    theirs = processor(picture, return_tensors="np")["pixel_values"][0]
    layout = lay_out(*size, CLIP, ANY)
    patches = cut(picture, layout, CLIP)
    assert not patches[0].any() and layout.position[0].tolist() == [0, -1, -1]
    assert np.abs(picture_of(patches[1:], CLIP, 4, 4) - theirs).max() < 1e-5
    assert layout.feature.tolist() == list(range(1, 17))
    assert lay_out(*size, dataclasses.replace(CLIP, class_feature="keep"), ANY).feature.tolist() == list(range(17))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_llava_next_sees_what_its_processor_gives(size):
    picture = random_picture(*size)
    pairs = zip(NEXT_TILINGS[::2], NEXT_TILINGS[1::2], strict=True)
    processor = pil_processor(
        "llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[[rows * SIDE, columns * SIDE] for rows, columns in pairs],
    )
    theirs = processor(picture, return_tensors="np")["pixel_values"][0]
    layout = lay_out(*size, TILED, ANY)
    tiles = cut(picture, layout, TILED).reshape(-1, 17, 3 * 14**2)
    assert len(tiles) == len(theirs) and layout.segment.max() == len(tiles)
    ours = np.stack([picture_of(tile[1:], TILED, 4, 4) for tile in tiles])
    assert np.abs(ours - theirs).max() < 1e-5

    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    class Counting(LlavaNextProcessor):
        def __init__(self):
            self.image_processor, self.patch_size, self.num_additional_image_tokens = processor, 14, 1

    # One more than there are: the processor's caller takes the class token off.
    assert Counting()._get_number_of_features(*size, SIDE, SIDE) - 1 == len(layout.feature)
    assert (layout.feature == NEWLINE).any()


@pytest.mark.parametrize("size", [*SIZES, (900, 700)], ids=str)
def test_qwen3_vl_sees_what_its_processor_gives(size):
    picture = random_picture(*size)
    half = [0.5, 0.5, 0.5]
    processor = pil_processor(
        "qwen2_vl",
        "Qwen2VLImageProcessorPil",
        patch_size=16,
        image_mean=half,
        image_std=half,
        size={"shortest_edge": 65_536, "longest_edge": 400_000},
    )
    theirs = processor(picture, return_tensors="np")
    layout = lay_out(*size, QWEN, 400_000 // 16**2)
    assert (1, *layout.grid[0, 1:]) == tuple(theirs["image_grid_thw"][0])
    assert np.abs(cut(picture, layout, QWEN) - theirs["pixel_values"]).max() < 1e-5
    assert len(layout.feature) == theirs["image_grid_thw"][0].prod() // 4


@pytest.mark.parametrize("size", [*SIZES, (1200, 700), (500, 2500)], ids=str)
def test_fuyu_sees_what_its_processor_gives(size):
    torch = pytest.importorskip("torch")
    picture = random_picture(*size)
    processor = pil_processor("fuyu", "FuyuImageProcessorPil")
    found = processor.preprocess(picture, return_tensors="np")
    theirs = processor.preprocess_with_tokenizer_info(
        torch.tensor(np.asarray(found["images"][0]))[None],
        torch.ones(1, 1),
        torch.tensor(found["image_unpadded_heights"]),
        torch.tensor(found["image_unpadded_widths"]),
        image_placeholder_id=7,
        image_newline_id=8,
        variable_sized=True,
    )
    layout = lay_out(*size, FUYU, ANY)
    assert np.abs(cut(picture, layout, FUYU) - theirs["image_patches"][0][0].numpy()).max() < 1e-5
    tokens = np.where(layout.feature == ORDINARY, 8, 7)
    assert tokens.tolist() == theirs["image_input_ids"][0][0].tolist()


@pytest.mark.parametrize(
    ("vision", "budget"), [(QWEN, 64), (FUYU, 6), (TILED, 4 * 17), (VisionConfig(patch_pixels=14), 64)], ids=str
)
def test_no_picture_takes_more_than_the_budget(vision, budget):
    for height, width in ((500, 400), (60, 900), (1500, 30), (20, 20)):
        layout = lay_out(height, width, vision, budget)
        assert layout.num_patches <= budget
        numbers = layout.feature[layout.feature >= 0]
        assert numbers.max() < layout.num_patches // vision.patches_per_feature and len(set(numbers)) == len(numbers)
        assert len(layout.position) == len(layout.grid) == layout.num_patches
        patches = cut(random_picture(height, width), layout, vision)
        assert patches.shape == (layout.num_patches, vision.patch_values) and patches.dtype == np.float32


def test_a_picture_that_cannot_be_laid_out_says_why():
    with pytest.raises(ValueError, match="no tiling"):
        lay_out(100, 100, TILED, 20)
    with pytest.raises(ValueError, match="takes 17 patches"):
        lay_out(100, 100, CLIP, 16)
    with pytest.raises(ValueError, match="200 times"):
        lay_out(1, 300, QWEN, ANY)


@pytest.mark.parametrize(
    "vision",
    [
        dataclasses.replace(TILED, patch_pixels=2),
        dataclasses.replace(QWEN, patch_pixels=4),
        dataclasses.replace(FUYU, patch_pixels=8),
        VisionConfig(patch_pixels=4),
    ],
    ids=lambda vision: vision.kind,
)
def test_a_packed_row_holds_its_pictures_in_the_order_of_their_tokens(vision):
    """Every token of a picture finds its feature's patches, whatever pictures and documents lie before it."""
    data = DataConfig(rows=1, row_tokens=900, row_patches=640, image_max_patches=136)
    tokenizer = ByteTokenizer()
    sizes = [(40, 60), (24, 16), (30, 70)]
    pictures = [random_picture(*size) for size in sizes]
    user = [Message(role="user", parts=(picture, "?"), is_supervised=False) for picture in pictures]
    answer = Message(role="assistant", parts=("!",), is_supervised=True)
    samples = [Sample(where="1", messages=(user[0], user[1], answer)), Sample(where="2", messages=(user[2], answer))]
    documents = [align(sample, tokenizer, data, vision) for sample in samples]
    batch = fill(
        [[PackedDocument(d, read_patches(d, data, vision)) for d in documents]], data, vision, tokenizer.pad_token_id
    )
    index, tokens = batch.feature_index[0], batch.tokens[0]
    start = patch = segment = 0
    for document in documents:
        places = iter(start + np.flatnonzero(document.is_feature))
        for placed in document.pictures:
            layout = placed.layout
            expected = cut(pictures.pop(0), layout, vision)
            per_feature = vision.patches_per_feature
            for feature in layout.feature:
                place = next(places)
                if feature == ORDINARY:
                    assert index[place] == -1 and tokens[place] == tokenizer.newline_token_id
                    continue
                assert tokens[place] == tokenizer.image_token_id
                if feature == NEWLINE:
                    assert index[place] == data.row_patches
                    continue
                here = batch.patches[0, index[place] * per_feature :][:per_feature]
                assert np.array_equal(here, expected[feature * per_feature :][:per_feature])
                if per_feature == 4:
                    assert batch.patch_feature[0, index[place]] == index[place]
            there = slice(patch, patch + layout.num_patches)
            assert np.array_equal(batch.patch_segment_ids[0, there], segment + layout.segment)
            assert np.array_equal(batch.patch_position[0, there], layout.position)
            segment, patch = segment + layout.segment.max(), patch + layout.num_patches
        start += len(document.tokens)
    assert not batch.patch_segment_ids[0, patch:].any() and (index[start:] == -1).all()
    assert not batch.loss_weight[0][np.append(index[1:] >= 0, False)].any()
