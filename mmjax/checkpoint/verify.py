"""The same tokens and pictures through transformers and ours: how far apart the logits are after a conversion."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table

from mmjax.checkpoint.manifest import first_line
from mmjax.checkpoint.strict_json import read_json
from mmjax.checkpoint.verify_pictures import pictured_rows
from mmjax.checkpoint.weights import RELEASED, load_weights, read_model
from mmjax.config import MeshConfig, ModelConfig
from mmjax.data.batch import Batch
from mmjax.errors import ConfigurationError
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh

_TEXTS = (
    "The capital of France is Paris, and the largest planet of our solar system is Jupiter.",
    "def largest(numbers):\n    result = numbers[0]\n    for number in numbers[1:]:\n",
    "3.14159 x 2 = 6.28318; 日本語 and Ελληνικά.",
)
_NUM_TOKENS = 48
_TOP = 5


def compare(original: Path, converted: Path) -> Table:
    """A table of how the logits of `original` in transformers and of `converted` here differ, both in float32.

    Rows of text, and rows with a picture where both read pictures; where they do not, the table says so.

    Raises:
      ConfigurationError: transformers is not installed or does not know the model.
      CheckpointError: `converted` is no whole converted checkpoint.
    """
    model = read_model(converted)
    if model.vision.is_present and model.vision.kind == "moonvit":
        raise ConfigurationError(
            "--verify",
            found="a model with a MoonViT tower (Kimi-K3), which no class of transformers is",
            expected="a model that transformers loads",
            remedy=f"the conversion is done; convert {converted} back and compare the files, which are the same bytes",
        )
    tokens = _tokens(converted / RELEASED, model.vocabulary_size)
    titles, batches, extras = [f"{len(tokens)} rows of text"], [_batch(model, tokens)], [{}]
    for number in _placeholders(converted / RELEASED)[:1]:
        if pictured := pictured_rows(model, number):
            titles.append(f"{len(pictured[0].tokens)} rows with a picture")
            batches.append(pictured[0])
            extras.append(pictured[1])
    inputs = [{"input_ids": b.tokens.astype(np.int64), **more} for b, more in zip(batches, extras, strict=True)]
    theirs = _their_logits(original, inputs)
    ours = _our_logits(converted, model, batches)
    found = [measure(*pair) for pair in zip(theirs, ours, strict=True)]
    has_tower = "vision_config" in read_json(converted / RELEASED / "config.json")
    caption = "Text alone: this model's tower is not read here." if has_tower and len(titles) == 1 else None
    table = Table("", *titles, title="Logits, transformers and ours", caption=caption)
    for name in found[0]:
        table.add_row(name, *(f"{values[name]:.6g}" for values in found))
    return table


def measure(theirs: np.ndarray, ours: np.ndarray) -> dict[str, float]:
    """How logits [..., W] differ from those they should be."""
    difference = np.abs(theirs - ours)
    log_theirs, log_ours = _log_softmax(theirs), _log_softmax(ours)
    top_theirs, top_ours = (np.argsort(-logits, axis=-1)[..., :_TOP] for logits in (theirs, ours))
    shared = (top_theirs[..., :, None] == top_ours[..., None, :]).any(axis=-1)
    return {
        "largest difference": float(difference.max()),
        "relative to the largest logit": float(difference.max() / np.abs(theirs).max()),
        "KL divergence, mean": float((np.exp(log_theirs) * (log_theirs - log_ours)).sum(axis=-1).mean()),
        "same likeliest token": float((top_theirs[..., 0] == top_ours[..., 0]).mean()),
        f"shared among the likeliest {_TOP}": float(shared.mean()),
    }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _tokens(folder: Path, vocabulary_size: int) -> np.ndarray:
    """[rows, tokens]: texts where there is a tokenizer, the rest drawn."""
    tokens = np.random.default_rng(0).integers(0, vocabulary_size, (len(_TEXTS), _NUM_TOKENS)).astype(np.int32)
    if (folder / "tokenizer.json").exists():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for row, text in zip(tokens, _TEXTS, strict=True):
            ids = tokenizer.encode(text, add_special_tokens=False).ids[:_NUM_TOKENS]
            row[: len(ids)] = ids
    # A placeholder would ask for a picture.
    for number in _placeholders(folder):
        tokens[tokens == number] = 0
    return tokens


def _placeholders(folder: Path) -> list[int]:
    from mmjax.checkpoint.released_config import PLACEHOLDERS

    config = read_json(folder / "config.json")
    return [config[name] for name in PLACEHOLDERS if type(config.get(name)) is int]


def _their_logits(original: Path, inputs: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "--verify", found=str(error), expected="torch and transformers", remedy="pip install -e '.[parity]'"
        ) from error
    # Without an answer of its own, transformers asks whether to run code that came with the weights.
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    folder = original
    files = sorted(original.glob("*.gguf")) if original.is_dir() else [original]
    if files:
        folder, options["gguf_file"] = files[0].parent, files[0].name
    failures = []
    for kind in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            network = getattr(transformers, kind).from_pretrained(folder, **options).eval()
        except Exception as error:
            # What it raises for a model that it does not know, or cannot unpack, is of many kinds.
            failures.append(f"{kind}: {first_line(error)}")
            continue
        with torch.no_grad():
            given = ({name: torch.from_numpy(array) for name, array in one.items()} for one in inputs)
            return [network(**one).logits.float().numpy() for one in given]
    raise ConfigurationError(
        "--verify",
        found="; ".join(failures),
        expected="a model that transformers loads",
        remedy="the conversion is done; compare with what the model's makers offer",
    )


def _our_logits(converted: Path, model: ModelConfig, batches: list[Batch]) -> list[np.ndarray]:
    model = dataclasses.replace(model, parameter_dtype="float32", compute_dtype="float32")
    definition, mesh = define(model), make_mesh(MeshConfig())
    groups = [definition.parameters, definition.router_biases, definition.frozen]
    whole = NamedSharding(mesh, PartitionSpec())
    wanted = {
        path: jax.ShapeDtypeStruct(variable.get_value().shape, variable.get_value().dtype, sharding=whole)
        for group in groups
        for path, variable in group.items()
    }
    arrays = load_weights(converted, wanted)

    def logits(parameters: dict, biases: dict, frozen: dict, batch: Batch) -> jax.Array:
        network = definition.assemble(parameters, biases, frozen)
        hidden, _ = network(batch)
        return jnp.einsum("bsd,dw->bsw", hidden, network.decoder.head_weights(hidden.dtype), precision="highest")

    run = jax.shard_map(logits, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    parts = [{path: arrays[path] for path in group} for group in groups]
    with jax.default_matmul_precision("highest"):
        return [np.asarray(jax.jit(run)(*parts, batch), np.float32) for batch in batches]


def _batch(model: ModelConfig, tokens: np.ndarray) -> Batch:
    """Each row one document without pictures."""
    rows, length = tokens.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    nothing = np.zeros((rows, 0), np.int32)
    values = model.vision.patch_values if model.vision.is_present else 0
    return Batch(
        tokens=tokens,
        targets=np.zeros_like(tokens),
        loss_weight=np.zeros(tokens.shape, np.float32),
        segment_ids=np.ones_like(tokens),
        positions=positions,
        feature_index=np.full_like(tokens, -1),
        patches=np.zeros((rows, 0, values), np.float32),
        patch_segment_ids=nothing,
        patch_position=np.zeros((rows, 0, 3), np.int32),
        patch_grid=np.ones((rows, 0, 3), np.int32),
        patch_feature=nothing,
        spectrograms=np.zeros((rows, 0, 0, 0), np.float32),
        sound_index=np.full_like(tokens, -1),
    )
