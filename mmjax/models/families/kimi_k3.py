"""Kimi-K3 and Kimi-K3.1: the Kimi-Linear decoder with gates, latent experts, depth residuals and MoonViT of its own."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import IndexerConfig, ModelConfig, VisionConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families.fields import Fields
from mmjax.models.families.kimi_linear import read_text, text_tensors
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor, Slot

MODEL_TYPES = ("kimi_k3", "kimi_k31")
ROOT = "language_model."


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Kimi-K3 or K3.1 -> our settings."""
    fields = Fields(config)
    fields.expect("tie_word_embeddings", False)
    # Which experts are packed shows in the tensors themselves; the token ids belong to the tokenizer.
    fields.ignore("ignore_index", "media_placeholder_token_id", "quantization_config", "use_unified_vision_chunk")
    fields.ignore("video_placeholder")
    text = dict(fields.take("text_config"))
    indexer = text.pop("dsa_config", None)
    model = dataclasses.replace(
        read_text(Fields(text, "config.json: text_config")), vision=_read_vision(fields.part("vision_config"))
    )
    if indexer:
        full = dataclasses.replace(model.full_attention, indexer=_read_indexer(indexer, model))
        model = dataclasses.replace(model, full_attention=full)
    fields.finish()
    return model


def _read_indexer(config: Mapping[str, Any], model: ModelConfig) -> IndexerConfig:
    """`dsa_config`, whose spelling is not published: what related models call its fields is accepted."""
    fields = Fields(config, "config.json: text_config: dsa_config")
    layers = fields.take("layers", "dsa_layers", "full_attn_layers", default=None)
    expected = [layer + 1 for layer in model.full_attention_layers]
    if layers is not None and sorted(layers) != expected:
        raise ConfigurationError(
            "config.json: text_config: dsa_config: layers",
            found=str(layers),
            expected=f"the layers with full attention, counted from 1: {expected}",
            remedy="an indexer on some of them only is not built",
        )
    for name in ("rope_dim", "index_rope_dim", "rope_head_dim"):
        fields.expect(name, 0)
    fields.ignore("types", "index_types")
    indexer = IndexerConfig(
        stage="sparse",
        num_heads=fields.take("index_n_heads", "n_heads", "num_heads", "head_count"),
        head_width=fields.take("index_head_dim", "head_dim", "key_length"),
        top_k=fields.take("index_topk", "topk", "top_k"),
        key_norm_bias=fields.take("k_norm_bias", default=True),
        key_norm_epsilon=model.norm_epsilon,
    )
    fields.finish()
    return indexer


def _read_vision(fields: Fields) -> VisionConfig:
    for name, value in (
        *(("pos_emb_type", "divided_fixed"), ("pos_emb_interpolation_mode", "bilinear"), ("norm_type", "rmsnorm")),
        *(("attn_bias", False), ("linear_bias", False), ("patch_embed_proj_bias", False), ("mlp_type", "mlp2")),
        *(("merge_kernel_size", [2, 2]), ("merge_type", "sd2_tpool"), ("video_attn_type", "spatial_temporal")),
        *(("activation_func", "gelu_pytorch_tanh"), ("mm_projector_type", "patchmergerv2")),
        *(("projector_hidden_act", "gelu"), ("init_pos_emb_time", 4)),
    ):
        fields.expect(name, value)
    width, num_heads = (
        fields.take("vt_hidden_size", "hidden_size"),
        fields.take("vt_num_attention_heads", "num_attention_heads"),
    )
    fields.expect("mm_hidden_size", width)
    fields.ignore("text_hidden_size")
    vision = VisionConfig(
        num_layers=fields.take("vt_num_hidden_layers", "num_hidden_layers"),
        width=width,
        num_heads=num_heads,
        head_width=fields.take("qkv_hidden_size") // num_heads,
        hidden_width=fields.take("vt_intermediate_size", "intermediate_size"),
        patch_pixels=fields.take("patch_size"),
        table_rows=fields.take("init_pos_emb_height"),
        table_columns=fields.take("init_pos_emb_width"),
        projector_norm_epsilon=fields.take("projector_ln_eps", default=1e-5),
    )
    fields.finish()
    return vision


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from text_tensors(model, ROOT)
    if model.vision.is_present:
        yield from _vision(model)


def canonical_name(name: str) -> str:
    """Some builds drop the root of the text model, or double it; some leave out `.weight` of the indexer's parts."""
    if name.startswith(("model.", "lm_head.")):
        name = ROOT + name
    while name.startswith(ROOT * 2):
        name = name.removeprefix(ROOT)
    if name.endswith((".wq_b", ".wk", ".weights_proj", ".k_norm")) and ".indexer." in name:
        name += ".weight"
    return name


def _vision(model: ModelConfig) -> Iterator[ReleasedTensor]:
    vision = model.vision
    width, qkv = vision.width, vision.num_heads * vision.head_width
    side = vision.patch_pixels

    def tensor(name: str, path: str, *shape: int, index: tuple[int, ...] = ()) -> ReleasedTensor:
        layout = LINEAR if len(shape) > 1 and "pos_emb" not in name else SAME
        return ReleasedTensor(name, shape, (Slot(path, index),), layout)

    embed = "vision_tower.patch_embed"
    yield tensor(f"{embed}.proj.weight", "vision.patch_embedding", width, vision.channels, side, side)
    table = (vision.table_rows, vision.table_columns, width)
    yield tensor(f"{embed}.pos_emb.weight", "vision.position_table", *table)
    yield tensor("vision_tower.encoder.final_layernorm.weight", "vision.final_norm", width)
    for block in range(vision.num_layers):
        for name, path, *shape in (
            ("norm0", "attention_norm", width),
            ("wqkv", "query_key_value", 3 * qkv, width),
            ("wo", "output", width, qkv),
            ("norm1", "mlp_norm", width),
            ("mlp.fc0", "up", vision.hidden_width, width),
            ("mlp.fc1", "down", width, vision.hidden_width),
        ):
            released = f"vision_tower.encoder.blocks.{block}.{name}.weight"
            yield tensor(released, f"vision.layers.{path}", *shape, index=(block,))
    merged = vision.merged_width
    yield tensor("mm_projector.proj.0.weight", "projector.up", merged, merged)
    yield tensor("mm_projector.proj.2.weight", "projector.down", model.width, merged)
    yield tensor("mm_projector.post_norm.weight", "projector.norm", model.width)
