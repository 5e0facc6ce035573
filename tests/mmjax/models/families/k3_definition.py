"""Kimi-K3 and K3.1 in torch, written from the formulas: one sample at a time, a token at a time, no cache, no batch.

Weights have their released names and shapes. It looks like a model of transformers to those who compare: `logits` of
token ids and pictures, hooks on the embedding, gradients on `parameters()`, `save_pretrained`.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.nn import functional

ROOT = "language_model.model."
EMBEDDING = f"{ROOT}embed_tokens.weight"
# Not written in a config.json: what torch takes for a norm without one, and that of the latents' norms.
TOWER_EPSILON, LATENT_EPSILON = 2.0**-23, 1e-6


class KimiK3(torch.nn.Module):
    """A released config.json and its tensors, as float64."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        super().__init__()
        self.config, self.text, self.tower = config, config["text_config"], config["vision_config"]
        self.names, self.dtypes = list(tensors), {name: tensor.dtype for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            value = torch.tensor(np.asarray(tensor, np.float64))
            if name == EMBEDDING:
                self.embedding = torch.nn.Embedding(*value.shape, _weight=value)
            elif name.endswith("e_score_correction_bias"):
                self.register_buffer(name.replace(".", "/"), value)
            else:
                self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(value))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: self[name].detach().numpy() for name in self.names}, folder / "model.safetensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.embedding.weight if name == EMBEDDING else getattr(self, name.replace(".", "/"))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pictures: list) -> SimpleNamespace:
        """`pictures` of each sample: ((frames, rows, columns), patches [n, C*p*p], row-major in each frame)."""
        embeddings = self.embedding(input_ids)
        logits = torch.zeros(*input_ids.shape, self.text["vocab_size"], dtype=torch.float64)
        for row, given in enumerate(pictures):
            length = int(attention_mask[row].sum())
            ids, hidden = input_ids[row, :length], embeddings[row, :length]
            features = [self.project(self.see(torch.as_tensor(patches), grid)) for grid, patches in given]
            places = torch.nonzero(ids == self.config["media_placeholder_token_id"])[:, 0]
            if features:
                hidden = hidden.index_put((places,), torch.cat(features))
            logits[row, :length] = self.decode(hidden)
        return SimpleNamespace(logits=logits)

    # The tower and its projector.

    def see(self, patches: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """[n, values] -> merged features [rows * columns / 4, 4 * width]."""
        frames, rows, columns = grid
        width, heads = self.tower["vt_hidden_size"], self.tower["vt_num_attention_heads"]
        head_width = self.tower["qkv_hidden_size"] // heads
        table = self["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        table = functional.interpolate(table, size=(rows, columns), mode="bilinear", align_corners=False)
        hidden = patches @ self["vision_tower.patch_embed.proj.weight"].flatten(1).T
        hidden = hidden.reshape(frames, rows * columns, width) + table[0].flatten(1).T
        if frames > 1:
            angles = torch.outer(torch.arange(frames).double(), 10000 ** (-2 * torch.arange(width // 2) / width))
            hidden = hidden + torch.cat([angles.sin(), angles.cos()], dim=1)[:, None]
        hidden = hidden.reshape(-1, width)

        # Complex numbers: of the pairs of a head, even ones turn by the column, odd ones by the row.
        place = torch.arange(frames * rows * columns) % (rows * columns)
        steps = torch.stack([place % columns, place // columns], dim=1).double()
        speed = 10000 ** (-4 * torch.arange(head_width // 4).double() / head_width)
        angles = (steps[:, None, :] * speed[None, :, None]).flatten(1)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(heads_of: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(heads_of.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        for layer in range(self.tower["vt_num_hidden_layers"]):
            block = f"vision_tower.encoder.blocks.{layer}."
            normed = norm(hidden, self[f"{block}norm0.weight"], TOWER_EPSILON)
            query, key, value = (normed @ self[f"{block}wqkv.weight"].T).unflatten(-1, (3, heads, head_width)).unbind(1)
            scores = torch.einsum("phk,qhk->hpq", turned(query), turned(key)) / math.sqrt(head_width)
            mixed = torch.einsum("hpq,qhk->phk", scores.softmax(-1), value).flatten(1)
            hidden = hidden + mixed @ self[f"{block}wo.weight"].T
            up = norm(hidden, self[f"{block}norm1.weight"], TOWER_EPSILON) @ self[f"{block}mlp.fc0.weight"].T
            hidden = hidden + functional.gelu(up, approximate="tanh") @ self[f"{block}mlp.fc1.weight"].T
        hidden = norm(hidden, self["vision_tower.encoder.final_layernorm.weight"], TOWER_EPSILON)
        cells = hidden.reshape(frames, rows // 2, 2, columns // 2, 2, width).mean(0)
        return cells.permute(0, 2, 1, 3, 4).reshape(rows * columns // 4, 4 * width)

    def project(self, merged: torch.Tensor) -> torch.Tensor:
        bent = functional.gelu(merged @ self["mm_projector.proj.0.weight"].T)
        return norm(bent @ self["mm_projector.proj.2.weight"].T, self["mm_projector.post_norm.weight"], 1e-5)

    # The decoder.

    def decode(self, running: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, hidden] of one sample -> logits [n, vocabulary]."""
        epsilon = self.text["rms_norm_eps"]
        sums: list[torch.Tensor] = []
        for layer in range(self.text["num_hidden_layers"]):
            here = f"{ROOT}layers.{layer}."
            mixed = self.mix(f"{here}self_attention", sums, running)
            if layer % self.text["attn_res_block_size"] == 0:
                sums.append(running)
                running = torch.zeros_like(running)
            normed = norm(mixed, self[f"{here}input_layernorm.weight"], epsilon)
            is_linear = layer + 1 in self.text["linear_attn_config"]["kda_layers"]
            running = running + (self.linear_attention if is_linear else self.attention)(f"{here}self_attn.", normed)
            normed = norm(
                self.mix(f"{here}mlp", sums, running), self[f"{here}post_attention_layernorm.weight"], epsilon
            )
            is_dense = layer < self.text["first_k_dense_replace"]
            running = running + (self.mlp(f"{here}mlp.", normed) if is_dense else self.experts(here, normed))
        last = norm(self.mix(f"{ROOT}output_attn", sums, running), self[f"{ROOT}norm.weight"], epsilon)
        return last @ self["language_model.lm_head.weight"].T

    def mix(self, name: str, sums: list[torch.Tensor], running: torch.Tensor) -> torch.Tensor:
        if not sums:
            return running
        sources = torch.stack([*sums, running])
        normed = norm(sources, self[f"{name}_res_norm.weight"], self.text["rms_norm_eps"])
        shares = (normed @ self[f"{name}_res_proj.weight"][0]).softmax(0)
        return (shares[..., None] * sources).sum(0)

    def linear_attention(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        settings = self.text["linear_attn_config"]
        heads, width = settings["num_heads"], settings["head_dim"]

        def convolved(part: str) -> torch.Tensor:
            taps = self[f"{name}{part}_conv1d.weight"][:, 0]
            padded = functional.pad(inputs @ self[f"{name}{part}_proj.weight"].T, (0, 0, taps.shape[1] - 1, 0))
            summed = sum(padded[i : i + len(inputs)] * taps[:, i] for i in range(taps.shape[1]))
            return functional.silu(summed).unflatten(-1, (heads, width))

        def unit(vectors: torch.Tensor) -> torch.Tensor:
            return vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        query, key, value = unit(convolved("q")) / math.sqrt(width), unit(convolved("k")), convolved("v")
        beta = (inputs @ self[f"{name}b_proj.weight"].T).sigmoid()
        raw = inputs @ self[f"{name}f_a_proj.weight"].T @ self[f"{name}f_b_proj.weight"].T + self[f"{name}dt_bias"]
        rate = self[f"{name}A_log"][:heads].exp()[:, None]
        decay = (settings["gate_lower_bound"] * (rate * raw.unflatten(-1, (heads, width))).sigmoid()).exp()
        state = torch.zeros(heads, width, width, dtype=torch.float64)
        outputs = []
        for token in range(len(inputs)):
            state = decay[token][..., None] * state
            missing = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
            state = state + torch.einsum("h,hk,hv->hkv", beta[token], key[token], missing)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[token]))
        normed = norm(torch.stack(outputs), self[f"{name}o_norm.weight"], self.text["rms_norm_eps"]).flatten(1)
        gate = (inputs @ self[f"{name}g_proj.weight"].T).sigmoid()
        return (gate * normed) @ self[f"{name}o_proj.weight"].T

    def attention(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        text, length = self.text, len(inputs)
        heads, latent_width = text["num_attention_heads"], text["kv_lora_rank"]
        nope, value_width = text["qk_nope_head_dim"], text["v_head_dim"]
        query_latent = inputs @ self[f"{name}q_a_proj.weight"].T
        query_latent = norm(query_latent, self[f"{name}q_a_layernorm.weight"], LATENT_EPSILON)
        query = (query_latent @ self[f"{name}q_b_proj.weight"].T).unflatten(-1, (heads, -1))
        down = inputs @ self[f"{name}kv_a_proj_with_mqa.weight"].T
        latent, shared = down.split([latent_width, down.shape[1] - latent_width], dim=1)
        latent = norm(latent, self[f"{name}kv_a_layernorm.weight"], LATENT_EPSILON)
        up = (latent @ self[f"{name}kv_b_proj.weight"].T).unflatten(-1, (heads, nope + value_width))
        key, value = up.split([nope, value_width], dim=-1)
        key = torch.cat([key, shared[:, None].expand(-1, heads, -1)], dim=-1)
        scores = torch.einsum("phk,qhk->hpq", query, key) / math.sqrt(key.shape[-1])
        allowed = torch.ones(length, length).tril().bool()
        if settings := text.get("dsa_config"):
            allowed = self.selected(f"{name}indexer.", settings, inputs, query_latent, allowed)
        shares = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        mixed = torch.einsum("hpq,qhv->phv", shares, value).flatten(1)
        return ((inputs @ self[f"{name}g_proj.weight"].T).sigmoid() * mixed) @ self[f"{name}o_proj.weight"].T

    def selected(
        self, name: str, settings: dict, inputs: torch.Tensor, query_latent: torch.Tensor, allowed: torch.Tensor
    ) -> torch.Tensor:
        """[n, n]: of the `allowed` keys of each query, the `top_k` that the indexer scores highest."""
        heads, width = settings["num_heads"], settings["head_dim"]
        query = (query_latent @ self[f"{name}wq_b.weight"].T).unflatten(-1, (heads, width))
        key = inputs @ self[f"{name}wk.weight"].T
        scale, bias = self[f"{name}k_norm.weight"], self[f"{name}k_norm.bias"]
        key = functional.layer_norm(key, (width,), scale, bias, self.text["rms_norm_eps"])
        head_weight = inputs @ self[f"{name}weights_proj.weight"].T / math.sqrt(heads)
        scores = torch.einsum("pj,pjq->pq", head_weight, torch.einsum("pjk,qk->pjq", query, key).relu())
        # A key that no head likes has a score of zero, as others have: the earlier one is taken.
        order = scores.masked_fill(~allowed, -math.inf).sort(dim=1, descending=True, stable=True).indices
        best = order[:, : settings["top_k"]]
        return torch.zeros_like(allowed).scatter(1, best, True) & allowed

    def experts(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        moe, top = f"{name}block_sparse_moe.", self.text["num_experts_per_token"]
        score = (inputs @ self[f"{moe}gate.weight"].T).sigmoid()
        chosen = (score + self[f"{moe}gate.e_score_correction_bias"]).topk(top, dim=1).indices
        weight = score.gather(1, chosen)
        weight = self.text["routed_scaling_factor"] * weight / (weight.sum(1, keepdim=True) + 1e-20)
        latent = inputs @ self[f"{moe}routed_expert_down_proj.weight"].T
        routed = [
            sum(
                weight[token, slot] * self.gated(f"{moe}experts.{int(expert)}.", ("w1", "w3", "w2"), latent[token])
                for slot, expert in enumerate(experts)
            )
            for token, experts in enumerate(chosen)
        ]
        normed = norm(torch.stack(routed), self[f"{moe}routed_expert_norm.weight"], self.text["rms_norm_eps"])
        return normed @ self[f"{moe}routed_expert_up_proj.weight"].T + self.mlp(f"{moe}shared_experts.", inputs)

    def mlp(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return self.gated(name, ("gate_proj", "up_proj", "down_proj"), inputs)

    def gated(self, name: str, parts: tuple[str, str, str], inputs: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self[f"{name}{part}.weight"] for part in parts)
        beta, linear_beta = self.text["activation_situ_beta"], self.text["activation_situ_linear_beta"]
        bent, linear = inputs @ gate.T, inputs @ up.T
        bent = beta * (bent / beta).tanh() * bent.sigmoid() * linear_beta * (linear / linear_beta).tanh()
        return bent @ down.T


def norm(inputs: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    return inputs * (inputs.square().mean(-1, keepdim=True) + epsilon).rsqrt() * scale
