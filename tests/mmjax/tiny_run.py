"""Settings that runs of the whole command share: every part of Kimi-K3 in two layers, and its digits."""

SETTINGS = """
model:
  width: 16
  num_layers: 2
  vocabulary_size: 264
  full_attention_layers: [1]
  residual_block_layers: 1
  linear_attention: {num_heads: 2, key_width: 4, value_width: 4, decay_rank: 4, chunk_tokens: 16}
  full_attention: {num_heads: 2, query_rank: 8, latent_width: 8, nope_width: 4, shared_key_width: 4, value_width: 4}
  moe: {num_experts: 4, experts_per_token: 2, expert_width: 8, latent_width: 8, dense_width: 16}
  vision: {num_layers: 1, width: 8, num_heads: 1, head_width: 8, hidden_width: 16}
data: {rows: 8, row_tokens: 48, row_patches: 32, image_max_patches: 16, packing_window: 4, eval_samples: 8}
optimizer: {warmup_steps: 2}
"""
