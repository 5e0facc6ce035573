"""The generate command on converted models that read pictures: the tokens that transformers gives, from its processor.

Nothing of ours prepares what transformers gets: its processors write the release's files, and read pictures and prompt.
"""

import numpy as np
import PIL.Image
import pytest

from mmjax import convert, generate
from mmjax.models.generation import Generator
from tests.mmjax.data import test_prompts

torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

NEW_TOKENS = 6
IMAGE = 260
TEXT = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}
CLIP = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP |= {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4, "initializer_range": 0.4}
# A line break behind each picture: Qwen tells two neighbours apart by what is between them.
TEMPLATE = test_prompts.TEMPLATE.replace("'<|image|>'", "'<|image|>\n'")
# (height, width): a wide one, a tall one.
SIZES = ((18, 40), (50, 22))


def pil_processor(module: str, name: str, **settings):
    """The variant of a picture processor that resizes with Pillow, as ours does."""
    return getattr(pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}"), name)(**settings)


def llava(tokenizer):
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config=dict(CLIP), image_token_index=IMAGE
    )
    square = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
    processor = transformers.LlavaProcessor(
        pil_processor("llava", "LlavaImageProcessorPil", **square),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<|image|>",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def llava_next(tokenizer):
    sizes = [[12, 24], [24, 12], [24, 24]]
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config=dict(CLIP),
        image_token_index=IMAGE,
        image_grid_pinpoints=sizes,
    )
    square = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
    processor = transformers.LlavaNextProcessor(
        pil_processor("llava_next", "LlavaNextImageProcessorPil", image_grid_pinpoints=sizes, **square),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<|image|>",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def qwen3_vl(tokenizer):
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": IMAGE, "video_token_id": 259, "vision_start_token_id": 257, "vision_end_token_id": 258}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rotary}, vision_config=vision, **tokens
    )
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 1024}, "patch_size": 4}
    pixels = pil_processor("qwen2_vl", "Qwen2VLImageProcessorPil", image_mean=[0.5] * 3, image_std=[0.5] * 3, **sizes)
    return transformers.Qwen3VLForConditionalGeneration(config), pixels


@pytest.mark.parametrize(
    "make", [llava, qwen3_vl, pytest.param(llava_next, marks=pytest.mark.slow)], ids=lambda make: make.__name__
)
def test_a_converted_model_answers_about_pictures_as_transformers_does(make, tmp_path, capsys, monkeypatch):
    files = {"config.json": None, "chat_template.jinja": TEMPLATE}
    released = test_prompts.write_release(tmp_path / "released", **files)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(released / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    torch.manual_seed(0)
    theirs, processor = make(tokenizer)
    theirs = theirs.eval()
    theirs.save_pretrained(released)
    processor.save_pretrained(released)
    test_prompts.write_release(released, **files)
    random = np.random.default_rng(0)
    pictures = [PIL.Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]
    options = []
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
        options += ["--image", str(tmp_path / f"{number}.png")]

    asked = "<s><|im_start|>user\n<|image|>\n<|image|>\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    if make is qwen3_vl:
        # Its processor wants torchvision for videos; this is what it does with pictures.
        inputs = dict(processor(pictures, return_tensors="pt"))
        for grid in inputs["image_grid_thw"]:
            asked = asked.replace("<|image|>", "<placeholder>" * int(grid.prod() // 4), 1)
        asked = asked.replace("<placeholder>", "<|image|>")
        inputs |= dict(tokenizer(asked, add_special_tokens=False, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    else:
        inputs = dict(processor(text=asked, images=pictures, add_special_tokens=False, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    given = theirs.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    expected = given.sequences[0, inputs["input_ids"].shape[1] :].tolist()

    steps, stream = [], Generator.stream

    def recorded(*arguments, **named):
        for step in stream(*arguments, **named):
            steps.append(step)
            yield step

    monkeypatch.setattr(Generator, "stream", recorded)
    assert convert.main([str(released), str(tmp_path / "ours")]) == 0
    command = [str(tmp_path / "ours"), *options, "--prompt", "Which?", "--max-new-tokens", str(NEW_TOKENS)]
    capsys.readouterr()
    assert generate.main(command) == 0
    printed = capsys.readouterr()
    assert printed.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n", printed.err
    assert [int(step.tokens[0]) for step in steps] == expected
    assert f"{inputs['input_ids'].shape[1]} tokens of 1 prompts" in printed.err
    errors = []
    for step, logits in zip(steps, given.logits, strict=True):
        logits = logits[0].numpy()
        errors.append(np.abs(np.asarray(step.logits)[0] - logits).max() / np.abs(logits).max())
    print(f"{make.__name__}: {expected}, logits within {max(errors):.1e} of the largest")
    assert max(errors) < 1e-4
