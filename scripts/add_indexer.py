"""Give a released Kimi-K3 a lightning indexer with random weights: a Kimi-K3.1 whose indexer is still to learn.

    python scripts/add_indexer.py tests/golden/k3_tiny downloads/k31_tiny --num-heads 4 --head-width 16 --top-k 64

Copies config and tensors, with new ones for every layer of full attention. `--vocabulary` also adds random rows to the
embeddings and the head, such as the recorded tiny model needs for the tokenizer of bytes.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = "language_model."
DEVIATION = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--head-width", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=0)
    options = parser.parse_args()
    config = json.loads((options.source / "config.json").read_text(encoding="utf-8"))
    text, random = config["text_config"], np.random.default_rng(0)
    tensors = load_file(options.source / "model.safetensors")
    rows = {
        "wq_b.weight": text["q_lora_rank"],
        "wk.weight": text["hidden_size"],
        "weights_proj.weight": text["hidden_size"],
    }
    columns = {"wq_b.weight": options.num_heads * options.head_width, "wk.weight": options.head_width}
    for layer in text["linear_attn_config"]["full_attn_layers"]:
        here = f"{ROOT}model.layers.{layer - 1}.self_attn.indexer."
        for name, inputs in rows.items():
            shape = columns.get(name, options.num_heads), inputs
            tensors[here + name] = DEVIATION * random.normal(size=shape).astype(np.float32)
        tensors[f"{here}k_norm.weight"] = np.ones(options.head_width, np.float32)
        tensors[f"{here}k_norm.bias"] = np.zeros(options.head_width, np.float32)
    if missing := max(options.vocabulary - text["vocab_size"], 0):
        text["vocab_size"] = options.vocabulary
        for name in (f"{ROOT}model.embed_tokens.weight", f"{ROOT}lm_head.weight"):
            more = tensors[name].std() * random.normal(size=(missing, text["hidden_size"]))
            tensors[name] = np.concatenate([tensors[name], more.astype(tensors[name].dtype)])
    config["model_type"] = "kimi_k31"
    text["dsa_config"] = {"num_heads": options.num_heads, "head_dim": options.head_width, "top_k": options.top_k}
    options.target.mkdir(parents=True)
    (options.target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, options.target / "model.safetensors")
    print(f"{options.target}: {len(text['linear_attn_config']['full_attn_layers'])} indexers, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
