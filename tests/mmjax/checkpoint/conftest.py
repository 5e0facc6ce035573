"""Small released checkpoints, made for the tests."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmjax.checkpoint.codecs import encode_mxfp4
from mmjax.models.families import family_of

GOLDEN = Path(__file__).parents[2] / "golden" / "k3_tiny"
MXFP4_SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True}},
    },
}


def k3_config(*, num_experts: int = 13, packed: bool = False) -> dict:
    """A Kimi-K3 of four layers whose experts MXFP4 can pack."""
    config = json.loads((GOLDEN / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "num_experts": num_experts, "moe_intermediate_size": 32, "attn_res_block_size": 2}
    text["linear_attn_config"] |= {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    if packed:
        text["quantization_config"] = MXFP4_SETTINGS
    return config


def llama_config(*, tied: bool = False) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }


def random_tensors(config: dict, dtype: type = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random numbers under the names of a release; routed experts packed where `config` says so."""
    random = np.random.default_rng(0)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    family = family_of(config)
    is_packed = "quantization_config" in config.get("text_config", {})
    tensors = {}
    for tensor in family.released_tensors(family.read_config(plain)):
        values = random.normal(size=tensor.shape).astype(np.float32)
        if tensor.name.endswith("A_log"):
            values[config["text_config"]["linear_attn_config"]["num_heads"] :] = 0
        if is_packed and ".experts." in tensor.name:
            stem = tensor.name.removesuffix("weight")
            tensors[f"{stem}weight_packed"], tensors[f"{stem}weight_scale"] = encode_mxfp4(values)
        else:
            keeps_wide = tensor.name.endswith(("A_log", "dt_bias", "gate.weight", "e_score_correction_bias"))
            tensors[tensor.name] = values if keeps_wide else values.astype(dtype)
    return tensors


def write_release(folder: Path, config: dict, tensors: dict[str, np.ndarray], *, num_shards: int = 1) -> Path:
    """A folder as the Hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(tensors)
    places = {
        name: f"model-{number * num_shards // len(names) + 1:05}-of-{num_shards:05}.safetensors"
        for number, name in enumerate(names)
    }
    for shard in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == shard}, folder / shard, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


class Releases:
    """What tests need of this file, without importing it."""

    golden = GOLDEN
    k3_config = staticmethod(k3_config)
    llama_config = staticmethod(llama_config)
    random_tensors = staticmethod(random_tensors)
    write = staticmethod(write_release)


@pytest.fixture(scope="session")
def releases() -> type[Releases]:
    return Releases


@pytest.fixture
def run_convert() -> Callable[..., int]:
    """`run_convert(src, dst, ...)`: the command in this process, its exit code."""
    from mmjax.convert import main

    return lambda *arguments: main([str(argument) for argument in arguments])
