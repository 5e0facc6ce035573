"""Train the same adapters on the same batch with transformers + peft and with mmjax, and compare the losses.

    python scripts/compare_losses.py {llava,kimi_linear} [--tiny] [--steps 50]

transformers draws a model of the released widths and few layers, peft draws its adapters (rank 16 on all projections of
the language model, or of both kinds of attention), and both are saved; then each side starts from these files and takes
the steps with the same AdamW. Losses are printed every tenth step with their relative difference. `--tiny` takes small
widths in float32, for a machine without a GPU.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE, LARGEST_DIFFERENCE = 1e-4, 1e-2
RANK, ALPHA = 16, 32
RELEASED, ADAPTER, BATCH, LOSSES = "released", "adapter", "batch.npz", "losses.json"
# What gets adapters, by their names there and here.
TARGETS = {
    "llava": (
        r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        r"decoder\..*\.(query|key|value|output|gate|up|down)",
    ),
    "kimi_linear": (r".*self_attn\..*_(proj|mqa)", r"decoder\..*\.mixer\..*"),
}


def llava_model(transformers: Any, *, is_tiny: bool) -> tuple[Any, dict[str, int]]:
    """The model, and the sizes of its batch."""
    if is_tiny:
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        vision |= {"image_size": 28, "patch_size": 14}
        text = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 4}
        sizes = {"rows": 2, "tokens": 64, "features": 4}
    else:
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16}
        vision |= {"image_size": 336, "patch_size": 14, "projection_dim": 768}
        text = {"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4}
        text |= {"num_attention_heads": 32, "max_position_embeddings": 4096}
        sizes = {"rows": 2, "tokens": 2048, "features": 576}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=text["vocab_size"] - 1,
    )
    sizes |= {"vocabulary": text["vocab_size"], "side": vision["image_size"], "patch": vision["patch_size"]}
    return transformers.LlavaForConditionalGeneration(config), sizes


def kimi_linear_model(transformers: Any, *, is_tiny: bool) -> tuple[Any, dict[str, int]]:
    """The model, and the sizes of its batch."""
    sizes = {"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 32}
    sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"num_experts": 64, "num_experts_per_token": 8, "moe_intermediate_size": 1024}
    heads, width, batch = 32, 128, {"rows": 2, "tokens": 2048, "features": 0}
    if is_tiny:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        sizes |= {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32}
        heads, width, batch = 4, 16, {"rows": 2, "tokens": 64, "features": 0}
    linear = {"head_dim": width, "num_heads": heads, "short_conv_kernel_size": 4}
    config = transformers.KimiLinearConfig(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_shared_experts=1,
        linear_attn_config=linear | {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.KimiLinearForCausalLM(config), batch | {"vocabulary": sizes["vocab_size"]}


def train_theirs(name: str, folder: Path, *, is_tiny: bool, steps: int) -> None:
    """Draw and save model, adapters and batch; then train with transformers and peft, and save the losses."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.float32 if is_tiny else torch.bfloat16)
    with torch.device(device):
        make = llava_model if name == "llava" else kimi_linear_model
        model, sizes = make(transformers, is_tiny=is_tiny)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / RELEASED)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[name][0], lora_dropout=0.0)
    )
    model.save_pretrained(str(folder / ADAPTER))
    random = np.random.default_rng(0)
    features = slice(8, 8 + sizes["features"])
    tokens = random.integers(3, sizes["vocabulary"] - 2, (sizes["rows"], sizes["tokens"]))
    labels, arrays, given = tokens.copy(), {}, {}
    if sizes["features"]:
        tokens[:, features] = sizes["vocabulary"] - 1
        labels[:, : features.stop] = -100
        arrays["pixels"] = random.normal(size=(sizes["rows"], 3, sizes["side"], sizes["side"])).astype(np.float32)
        given["pixel_values"] = torch.tensor(arrays["pixels"], device=device, dtype=model.dtype)
    np.savez(folder / BATCH, tokens=tokens, labels=labels, patch=sizes.get("patch", 0), **arrays)
    given |= {"input_ids": torch.tensor(tokens, device=device), "labels": torch.tensor(labels, device=device)}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    (folder / LOSSES).write_text(json.dumps(losses))


def train_ours(name: str, folder: Path, *, is_tiny: bool, steps: int) -> list[float]:
    """The losses of as many steps from the saved model and adapters, on the saved batch."""
    from mmjax.checkpoint.convert import Progress, convert
    from mmjax.checkpoint.released_files import open_released
    from mmjax.checkpoint.weights import read_model
    from mmjax.config import DataConfig, LoraConfig, MeshConfig, OptimizerConfig, RunConfig, TrainingConfig
    from mmjax.parallel.mesh import make_mesh
    from mmjax.training.step import init_state, make_train_step, place_batch

    convert(open_released(folder / RELEASED), folder / "ours", Progress(lambda _: None, lambda text: None))
    dtype = "float32" if is_tiny else "bfloat16"
    with np.load(folder / BATCH) as arrays:
        rows, length = arrays["tokens"].shape
        patches = (arrays["pixels"].shape[2] // int(arrays["patch"])) ** 2 + 1 if "pixels" in arrays else 0
        config = RunConfig(
            weights=str(folder / "ours"),
            model=dataclasses.replace(read_model(folder / "ours"), compute_dtype=dtype, parameter_dtype=dtype),
            lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=(TARGETS[name][1],), start=str(folder / ADAPTER)),
            data=DataConfig(rows=rows, row_tokens=length, row_patches=patches, image_max_patches=max(1, patches)),
            optimizer=OptimizerConfig(
                learning_rate=LEARNING_RATE,
                final_learning_rate_fraction=1.0,
                warmup_steps=0,
                weight_decay=0.0,
                beta1=0.9,
                beta2=0.999,
                max_gradient_norm=0.0,
            ),
            training=TrainingConfig(steps=steps),
        )
        batch = batch_of(config, arrays)
    mesh = make_mesh(MeshConfig())
    state, placed = init_state(config, mesh), place_batch(batch, mesh)
    step, losses = make_train_step(config, mesh), []
    for _ in range(steps):
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
    return losses


def batch_of(config: Any, arrays: Any) -> Any:
    """The saved batch as ours."""
    from mmjax.data.packing import fill

    batch = fill([], config.data, config.model.vision, 0)
    tokens, labels = arrays["tokens"], arrays["labels"]
    batch.tokens[...] = tokens
    batch.targets[:, :-1] = np.maximum(labels[:, 1:], 0)
    batch.loss_weight[:, :-1] = labels[:, 1:] >= 0
    batch.segment_ids[...] = 1
    batch.positions[...] = np.arange(tokens.shape[1])
    if "pixels" in arrays:
        side, pixels = int(arrays["patch"]), arrays["pixels"]
        number = pixels.shape[2] // side
        cells = pixels.reshape(len(pixels), 3, number, side, number, side).transpose(0, 2, 4, 1, 3, 5)
        # Before the patches a slot for the class token, whose numbers do not matter.
        batch.patches[:, 1:] = cells.reshape(len(pixels), number**2, -1)
        batch.patch_segment_ids[...] = 1
        batch.patch_position[:, 0] = (0, -1, -1)
        batch.patch_position[:, 1:, 1:] = np.stack(np.divmod(np.arange(number**2), number), axis=1)
        batch.patch_grid[...] = (1, number, number)
        batch.feature_index[:, 8 : 8 + number**2] = np.arange(1, 1 + number**2)
    return batch


def compare(name: str, folder: Path, *, is_tiny: bool, steps: int) -> float:
    """Print both losses every tenth step; the largest relative difference of all steps."""
    theirs = json.loads((folder / LOSSES).read_text())
    ours = train_ours(name, folder, is_tiny=is_tiny, steps=steps)
    differences = [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]
    for step in sorted({1, *range(10, steps + 1, 10), steps}):
        print(
            f"{name} step {step:3d}: transformers + peft {theirs[step - 1]:.5f}, ours {ours[step - 1]:.5f}, "
            f"relative difference {differences[step - 1]:.1e}",
            flush=True,
        )
    # Not `max`, which may pass over a loss that is not a number.
    largest = float(np.max(differences))
    print(f"{name}: largest relative difference of {steps} steps {largest:.1e}", flush=True)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(TARGETS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--theirs", metavar="FOLDER", help="the part of transformers alone, into this folder")
    options = parser.parse_args()
    settings = {"is_tiny": options.tiny, "steps": options.steps}
    if options.theirs:
        train_theirs(options.model, Path(options.theirs), **settings)
        return
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: the memory of torch is free again behind it.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--theirs", folder], check=True)
        if not compare(options.model, Path(folder), **settings) <= LARGEST_DIFFERENCE:
            raise SystemExit(f"losses differ by more than {LARGEST_DIFFERENCE}")


if __name__ == "__main__":
    main()
