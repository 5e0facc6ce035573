"""The generate command: runs, adapters and converted checkpoints; what it prints, and what it refuses."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import tokenizers

from mmjax import generate
from mmjax.checkpoint.adapters import base_of
from mmjax.checkpoint.store import Store
from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RunConfig,
    VisionConfig,
    saved,
)
from mmjax.data.prompts import ReleasedForm, TrainingForm, prompt_batch
from mmjax.data.sources.conversation import Message, Sample
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.parallel.mesh import make_mesh
from mmjax.training.evaluation import make_predict
from mmjax.training.loop import CHECKPOINTS
from mmjax.training.step import TrainState, init_state, place_batch, saved_part
from tests.mmjax.data.test_prompts import write_release

NEW_TOKENS = 6
MODEL = ModelConfig(
    width=16,
    num_layers=1,
    vocabulary_size=264,
    full_attention_layers=(0,),
    full_attention_kind="grouped",
    residual="plain",
    initializer_range=0.4,
    grouped_attention=GroupedAttentionConfig(num_heads=2, num_key_heads=2, head_width=8, rotary=RotaryConfig(width=8)),
    moe=MoeConfig(num_dense_layers=1, dense_width=16),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16),
)
DATA = DataConfig(rows=8, row_tokens=64, row_patches=16, image_max_patches=16)


def save_run(folder: Path, config: RunConfig, state: TrainState, step: int = 3) -> None:
    """A run's folder with one more checkpoint, as training leaves it."""
    saved.save(config)
    metadata = {"base": base_of(config)} if config.lora.rank else {}
    with Store(folder / CHECKPOINTS) as checkpoints:
        checkpoints.save(step, saved_part(config, state), metadata)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, RunConfig, TrainState]:
    folder = tmp_path_factory.mktemp("run")
    config = RunConfig(run_dir=str(folder), model=MODEL, data=DATA, mesh=MeshConfig(expert=2))
    state = init_state(config, make_mesh(MeshConfig()))
    save_run(folder, config, state)
    return folder, config, state


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "picture.png"
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16), dtype=np.uint8)).save(path)
    return path


def answer_by_training(config: RunConfig, state: TrainState, parts: tuple) -> str:
    """The greedy answer by the program of evaluation during training, which knows no cache."""
    config = dataclasses.replace(config, mesh=MeshConfig())
    form = TrainingForm(ByteTokenizer(), config.data, config.model.vision)
    asked = Sample(where="here", messages=(Message(role="user", parts=parts, is_supervised=False),))
    (document,) = form.chats([asked])
    length = len(document.tokens)
    batch = prompt_batch([document], 1, config.data, config.model.vision, 256)
    room = 64 - batch.tokens.shape[1]
    batch = batch._replace(
        **{
            name: np.pad(
                getattr(batch, name), ((0, 0), (0, room)), constant_values=-1 if name == "feature_index" else 0
            )
            for name in ("tokens", "targets", "loss_weight", "segment_ids", "positions", "feature_index")
        }
    )
    batch.positions[:] = np.arange(64)
    batch.segment_ids[:, : length + NEW_TOKENS] = 1
    batch.loss_weight[:] = 1
    mesh = make_mesh(MeshConfig())
    predict = make_predict(config, mesh)
    for place in range(length, length + NEW_TOKENS):
        predicted = predict(state.parameters, state.router_biases, state.frozen, place_batch(batch, mesh))
        # The command never takes a token that the tokenizer has no text for; these models do not want one either.
        batch.tokens[0, place] = np.asarray(predicted)[0, place - 1]
    tokens = batch.tokens[0, length : length + NEW_TOKENS].tolist()
    return form.decode(tokens[: tokens.index(261)] if 261 in tokens else tokens)


def command(*arguments: str) -> int:
    return generate.main(
        [*arguments, *(() if "--max-new-tokens" in arguments else ("--max-new-tokens", str(NEW_TOKENS)))]
    )


def test_a_run_answers_with_pictures_as_its_own_evaluation_does(run, picture, capsys):
    folder, config, state = run
    assert command(str(folder), "--prompt", "sum?", "--image", str(picture)) == 0
    printed = capsys.readouterr()
    pixels = np.asarray(PIL.Image.open(picture))
    expected = answer_by_training(config, state, (pixels, "sum?"))
    assert printed.out == expected + "\n" and expected
    assert "step 3 of" in printed.err and "tokens of 1 prompts read" in printed.err


def test_several_conversations_are_answered_in_their_order_and_as_each_alone(run, picture, capsys):
    folder, *_ = run
    file = picture.parent / "asked.jsonl"
    questions = ["sum?", "<image>largest of all the numbers?", "x"]
    file.write_text(
        "\n".join(
            json.dumps(
                {"messages": [{"role": "user", "content": text}], "images": [picture.name] * text.count("<image>")}
            )
            for text in questions
        )
    )
    assert command(str(folder), "--messages", str(file), "--rows", "2") == 0
    together = capsys.readouterr().out
    alone = []
    for number, text in enumerate(questions, 1):
        images = ["--image", str(picture)] if "<image>" in text else []
        assert command(str(folder), "--prompt", text.removeprefix("<image>"), *images) == 0
        alone.append(f"--- {file}, line {number}\n{capsys.readouterr().out}")
    assert together == "".join(alone)


def test_a_mesh_prints_the_same_and_a_draw_repeats_itself(run, capsys):
    folder, *_ = run
    arguments = (str(folder), "--prompt", "sum?", "--temperature", "1.2", "--top-k", "9", "--seed", "5")
    texts = []
    for more in ((), ("--mesh", "tensor=2"), ("--seed", "6")):
        assert command(*arguments, *more) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(run, tmp_path, capsys):
    folder, config, state = run
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    doubled = dataclasses.replace(state, parameters={p: 2 * array for p, array in state.parameters.items()})
    save_run(copy, dataclasses.replace(config, run_dir=str(copy)), doubled, step=4)
    assert command(str(copy), "--prompt", "sum?") == 0
    newest = capsys.readouterr()
    largest = max((copy / CHECKPOINTS / "4").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert command(str(copy), "--prompt", "sum?") == 0
    printed = capsys.readouterr()
    assert command(str(folder), "--prompt", "sum?") == 0
    assert printed.out == capsys.readouterr().out != newest.out
    assert "4: damaged: " in printed.err and "step 3 of" in printed.err
    assert sorted(path.name for path in (copy / CHECKPOINTS).iterdir()) == ["3", "4"]
    shutil.rmtree(copy / CHECKPOINTS)
    assert command(str(copy), "--prompt", "sum?") == 4
    assert "no sound checkpoint" in capsys.readouterr().err


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path]:
    """(released folder, converted folder) of a tiny Llama with random weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from mmjax import convert

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        eos_token_id=[258, 259],
        bos_token_id=256,
        pad_token_id=259,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "released")
    write_release(folder / "released", **{"config.json": None, "generation_config.json": None})
    assert convert.main([str(folder / "released"), str(folder / "ours")]) == 0
    return folder / "released", folder / "ours"


def continued_by_transformers(released: Path, tokens: list[int]) -> list[int]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(released, dtype=torch.float32)
    text = model.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return text[0, len(tokens) :].tolist()


def test_a_converted_checkpoint_continues_and_answers_as_transformers_does(converted, capsys):
    released, ours = converted
    form = ReleasedForm(released, DATA, VisionConfig(num_layers=0))
    assert command(str(ours), "--style", "text", "--prompt", "The capital") == 0
    expected = continued_by_transformers(released, form.text("The capital").tokens.tolist())
    assert capsys.readouterr().out == form.decode(expected) + "\n"
    assert command(str(ours), "--prompt", "Hi", "--system", "Be brief.") == 0
    messages = (
        Message(role="system", parts=("Be brief.",), is_supervised=False),
        Message(role="user", parts=("Hi",), is_supervised=False),
    )
    (asked,) = form.chats([Sample(where="here", messages=messages)])
    expected = continued_by_transformers(released, asked.tokens.tolist())
    assert capsys.readouterr().out == form.decode(expected) + "\n" and len(expected) == NEW_TOKENS


def test_adapters_answer_on_the_model_that_they_were_trained_on(converted, tmp_path, capsys):
    from mmjax.checkpoint.weights import read_model

    _, ours = converted
    config = RunConfig(
        run_dir=str(tmp_path / "adapted"), weights=str(ours), model=read_model(ours), lora=LoraConfig(rank=2), data=DATA
    )
    state = init_state(config, make_mesh(MeshConfig()))
    plain = answer_by_training(config, state, ("sum?",))
    factors = {
        path: jnp.asarray(np.random.default_rng(0).normal(size=array.shape), array.dtype)
        for path, array in state.parameters.items()
    }
    state = dataclasses.replace(state, parameters=factors)
    save_run(tmp_path / "adapted", config, state)
    assert command(str(tmp_path / "adapted"), "--prompt", "sum?") == 0
    printed = capsys.readouterr().out
    assert printed == answer_by_training(config, state, ("sum?",)) + "\n" != plain + "\n"


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(run, tmp_path, capsys):
    file = write_release(tmp_path) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_tokens([f"<word {number}>" for number in range(9)])
    tokenizer.save(str(file))
    assert command(str(run[0]), "--prompt", "x", "--tokenizer", str(tmp_path)) == 3
    assert "a tokenizer of 271 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "exit_code", "found"),
    [
        (("{run}",), 2, "--prompt: none; give it or --messages"),
        (("{run}", "--prompt", "x", "--messages", "m.jsonl"), 2, "--prompt: it and --messages"),
        (("{run}", "--prompt", "x", "--temperature", "-1", "--top-p", "0", "--rows", "0"), 2, "--top-p: 0.0"),
        (("{run}", "--prompt", "x", "--style", "text", "--image", "a.png"), 2, "text with pictures"),
        (("{run}", "--prompt", "x", "--mesh", "tensor=64"), 2, "needs 64 devices"),
        (("{run}", "--prompt", "x", "--mesh", "context=2"), 2, "pipe=1 and context=1"),
        (("{run}", "--prompt", "x", "--mesh", "tensor=8"), 2, "num_heads"),
        (("{run}", "--prompt", "x", "--chat-template", "t"), 2, "which has none"),
        (("{run}", "--prompt", "x", "--tokenizer", "{empty}"), 3, "tokenizer.json"),
        (("{run}", "--prompt", "x", "--image", "none.png"), 3, "none.png"),
        (("{run}", "--messages", "{empty}/none.jsonl"), 3, "none.jsonl"),
        (("{empty}", "--prompt", "x"), 4, "neither config.yaml nor model.yaml"),
        (("{empty}/none", "--prompt", "x"), 4, "no folder"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_an_exit_code(run, tmp_path, capsys, arguments, exit_code, found):
    names = {"run": str(run[0]), "empty": str(tmp_path)}
    assert command(*(argument.format(**names) for argument in arguments)) == exit_code
    printed = capsys.readouterr()
    assert found in printed.err and "Traceback" not in printed.err and not printed.out
