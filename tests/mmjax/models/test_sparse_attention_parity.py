"""Latent attention against the implementations in transformers, weights copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.config import FullAttentionConfig, IndexerConfig, ModelConfig
from mmjax.models.sparse_attention import LatentAttention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROWS, TOKENS, WIDTH, HEADS = 2, 23, 32, 4


def randomise(attention) -> dict[str, np.ndarray]:
    """Give every tensor random values, norms included, and return them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in attention.named_parameters():
            tensor.normal_(std=0.3).add_(1.0 if "norm.weight" in name else 0.0)
    return {name: tensor.detach().numpy() for name, tensor in attention.named_parameters()}


def heads(matrix: np.ndarray, num_heads: int = HEADS) -> np.ndarray:
    """torch's [H * K, D] -> [D, H, K]."""
    return matrix.T.reshape(matrix.shape[1], num_heads, -1)


def latent_weights(full: FullAttentionConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    key_value = heads(tensors["kv_b_proj.weight"])
    return {
        "latent_down": tensors["kv_a_proj_with_mqa.weight"].T,
        "latent_norm": tensors["kv_a_layernorm.weight"],
        "key_up": key_value[..., : full.nope_width],
        "value_up": key_value[..., full.nope_width :],
        "output": tensors["o_proj.weight"].T.reshape(HEADS, full.value_width, WIDTH),
    }


def run(one_device, model: ModelConfig, weights: dict, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    graph, state = nnx.split(LatentAttention(model))
    found = nnx.to_pure_dict(state)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, weights)
    nnx.replace_by_pure_dict(state, weights)
    segments = positions = jnp.ones(inputs.shape[:2], jnp.int32)
    return jax.jit(one_device(lambda state: nnx.merge(graph, state)(jnp.asarray(inputs), segments, positions)))(state)


def assert_close(found, expected):
    expected = expected.detach().numpy()
    assert np.abs(np.asarray(found) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_sparse_attention_equals_glm5_next_with_unpooled_keys(one_device):
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

    full = FullAttentionConfig(
        num_heads=HEADS,
        query_rank=24,
        latent_width=16,
        nope_width=12,
        shared_key_width=0,
        value_width=10,
        latent_norm_epsilon=1e-5,
        output_gate="none",
        query_chunk_tokens=8,
        # Many heads: were all of them silent for two keys, the scores would tie, and torch breaks ties as it likes.
        # The index key's norm has 1e-6 there, whatever the configuration says.
        indexer=IndexerConfig(stage="sparse", num_heads=16, head_width=6, top_k=5, key_norm_epsilon=1e-6),
    )
    model = ModelConfig(width=WIDTH, full_attention=full)
    config = Glm5NextTextConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=full.query_rank,
        kv_lora_rank=full.latent_width,
        qk_nope_head_dim=full.nope_width,
        qk_rope_head_dim=0,
        v_head_dim=full.value_width,
        rms_norm_eps=full.latent_norm_epsilon,
        index_n_heads=full.indexer.num_heads,
        index_head_dim=full.indexer.head_width,
        index_topk=full.indexer.top_k,
        index_kpool=1,
        num_hidden_layers=1,
        indexer_types=["full"],
        attn_implementation="eager",
    )
    theirs = Glm5NextTextAttention(config, 0)
    tensors = randomise(theirs)
    weights = latent_weights(full, tensors) | {
        "query_down": tensors["q_a_proj.weight"].T,
        "query_norm": tensors["q_a_layernorm.weight"],
        "query_up": heads(tensors["q_b_proj.weight"]),
        "indexer": {
            "query_up": heads(tensors["indexer.wq_b.weight"], 16),
            "key": tensors["indexer.wk.weight"].T,
            "key_norm_scale": tensors["indexer.k_norm.weight"],
            "key_norm_bias": tensors["indexer.k_norm.bias"],
            "head_weight": tensors["indexer.weights_proj.weight"].T,
        },
    }
    # Small inputs, so that a wrong epsilon shows.
    inputs = torch.randn(ROWS, TOKENS, WIDTH) * 3e-3
    expected = theirs(inputs, torch.ones(ROWS, TOKENS, dtype=torch.bool))[0]
    assert_close(run(one_device, model, weights, inputs.numpy())[0], expected)


def test_latent_attention_equals_kimi_linear(one_device):
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

    full = FullAttentionConfig(
        num_heads=HEADS,
        query_rank=0,
        latent_width=16,
        nope_width=12,
        shared_key_width=6,
        value_width=10,
        latent_norm_epsilon=1e-6,
        output_gate="none",
        query_chunk_tokens=8,
    )
    config = KimiLinearConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=full.latent_width,
        qk_nope_head_dim=full.nope_width,
        qk_rope_head_dim=full.shared_key_width,
        v_head_dim=full.value_width,
        attn_implementation="eager",
    )
    theirs = KimiLinearAttention(config, 3)
    tensors = randomise(theirs)
    weights = latent_weights(full, tensors) | {"query": heads(tensors["q_proj.weight"])}
    inputs = torch.randn(ROWS, TOKENS, WIDTH) * 3e-3
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = theirs(inputs, mask)[0]
    assert_close(run(one_device, ModelConfig(width=WIDTH, full_attention=full), weights, inputs.numpy())[0], expected)
