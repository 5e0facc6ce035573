"""LLaVA's recipe through the commands: the projector alone is trained, then adapters on what came of it."""

import json

import numpy as np
import PIL.Image
import pytest

from mmjax import convert, train
from mmjax.monitor.metrics import read_lines
from tests.mmjax.data import test_prompts
from tests.mmjax.test_generate_pictures import TEMPLATE, llava

torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
safetensors = pytest.importorskip("safetensors.numpy")


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in safetensors.load_file(file).items()}


def changed(folder, other) -> set[str]:
    ours, theirs = tensors_of(folder), tensors_of(other)
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not np.array_equal(ours[name], theirs[name])}


@pytest.fixture
def released(tmp_path):
    """A tiny LLaVA with random weights, as transformers writes it."""
    files = {"config.json": None, "chat_template.jinja": TEMPLATE}
    folder = test_prompts.write_release(tmp_path / "released", **files)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    torch.manual_seed(0)
    model, processor = llava(tokenizer)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    test_prompts.write_release(folder, **files)
    return folder


def test_adapters_start_from_the_projector_that_a_run_before_has_trained(released, tmp_path):
    random = np.random.default_rng(0)
    lines = []
    for number in range(8):
        PIL.Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)).save(tmp_path / f"{number}.png")
        talk = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": f"It is {number}."}]
        lines.append(json.dumps({"messages": talk, "images": [f"{number}.png"]}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")

    def run(weights: str, run_dir: str, *options: str) -> int:
        own = released
        data = ["--data.source", tmp_path / "talks.jsonl", "--data.tokenizer", own / "tokenizer.json"]
        data += ["--data.chat-template", own, "--data.image-token", "<|image|>", "--data.end-token", "<|im_end|>"]
        data += ["--data.rows", 2, "--data.row-tokens", 96, "--data.row-patches", 10, "--data.image-max-patches", 10]
        steps = ["--training.steps", 2, "--training.eval-every-steps", 0, "--optimizer.warmup-steps", 0]
        command = ["--weights", tmp_path / weights, "--run-dir", tmp_path / run_dir, *data, *steps, *options]
        return train.main([str(word) for word in command])

    def convert_to(source: str, target: str, *options: str) -> None:
        assert convert.main([str(tmp_path / source), str(tmp_path / target), *options]) == 0

    convert_to("released", "ours")
    assert run("ours", "projector_run", "--trained", "projector") == 0
    convert_to("projector_run", "with_projector")
    moved = changed(tmp_path / "with_projector", released)
    assert moved and all("multi_modal_projector" in name for name in moved)
    convert_to("with_projector", "ours_with_projector")

    # The tower has a q_proj too.
    adapters = ["--lora.rank", "2", "--lora.targets", r"language_model\..*\.q_proj"]
    assert run("ours_with_projector", "adapter_run", *adapters) == 0
    convert_to("adapter_run", "merged", "--merge")
    adapted = changed(tmp_path / "merged", tmp_path / "with_projector")
    assert len(adapted) == 2 and all("q_proj" in name for name in adapted)
    for name in ("projector_run", "adapter_run"):
        records = read_lines(tmp_path / name / "metrics.jsonl")
        assert len(records) == 2 and all(np.isfinite(record["loss"]) for record in records)
    # On the base of the first stage the adapter is refused: it was trained behind another projector.
    assert run("ours", "adapter_run", *adapters, "--training.steps", "4") == 4
