"""A whole tiny Kimi-Linear against transformers: logits, loss and every gradient, from the same random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.models.decoder import layer_address
from mmjax.models.layers import use
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import make_value_and_gradient, place_batch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = ModelConfig(
    width=32,
    num_layers=5,
    vocabulary_size=64,
    full_attention_layers=(3,),
    residual="plain",
    linear_attention=LinearAttentionConfig(
        num_heads=2,
        key_width=8,
        value_width=8,
        decay="softplus",
        decay_rank=8,
        output_gate="low_rank",
        output_gate_rank=8,
    ),
    full_attention=FullAttentionConfig(
        num_heads=2,
        query_rank=0,
        latent_width=12,
        nope_width=8,
        shared_key_width=4,
        value_width=8,
        output_gate="none",
    ),
    moe=MoeConfig(
        num_experts=8,
        experts_per_token=2,
        expert_width=16,
        latent_width=0,
        dense_width=48,
        router=RouterConfig(scale=2.446),
    ),
    activation=ActivationConfig(kind="silu"),
    vision=VisionConfig(num_layers=0),
    parameter_dtype="float64",
    compute_dtype="float64",
    loss_chunk_tokens=16,
)
LENGTHS = (24, 17)


def their_model():
    config = transformers.KimiLinearConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=5,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
        # 1-indexed, as in released configurations.
        linear_attn_config={
            "head_dim": 8,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
        },
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.KimiLinearForCausalLM(config).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("norm.weight", "A_log", "dt_bias")):
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=random))
            elif "e_score_correction_bias" in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=random))
            else:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=random))
    # In float64 as far as their code allows: in float32 its own rounding reaches 7e-5 of a gradient, five times ours.
    return model.double()


def to_ours(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors (or their gradients) in transformers' names and layouts -> ours, by path."""
    variables = define(MODEL).parameters | define(MODEL).router_biases
    ours = {path: np.zeros(v.get_value().shape, np.float64) for path, v in variables.items()}
    ours["decoder.embedding"][...] = tensors["model.embed_tokens.weight"]
    ours["decoder.head"][...] = tensors["lm_head.weight"].T
    ours["decoder.norm"][...] = tensors["model.norm.weight"]
    for layer in range(MODEL.num_layers):
        address = layer_address(MODEL, layer)

        def put(path: str, value: np.ndarray, address=address) -> None:
            slot = ours[f"decoder.segments.{address.segment}.layers.{address.position}.{path}"][address.repeat]
            slot[...] = value.reshape(slot.shape)

        theirs = {n.removeprefix(f"model.layers.{layer}."): t for n, t in tensors.items() if f"layers.{layer}." in n}
        put("input_norm", theirs["input_layernorm.weight"])
        put("mlp_norm", theirs["post_attention_layernorm.weight"])
        put("mixer.output", theirs["self_attn.o_proj.weight"].T)
        put_mixer(put, {n.removeprefix("self_attn."): t for n, t in theirs.items() if n.startswith("self_attn.")})
        put_mlp(put, {n.removeprefix("mlp."): t for n, t in theirs.items() if n.startswith("mlp.")})
    return ours


def put_mixer(put, theirs: dict[str, np.ndarray]) -> None:
    if "conv1d.weight" not in theirs:
        put("mixer.query", theirs["q_proj.weight"].T)
        put("mixer.latent_down", theirs["kv_a_proj_with_mqa.weight"].T)
        put("mixer.latent_norm", theirs["kv_a_layernorm.weight"])
        by_head = theirs["kv_b_proj.weight"].reshape(2, 16, 12).transpose(2, 0, 1)
        put("mixer.key_up", by_head[..., :8])
        put("mixer.value_up", by_head[..., 8:])
        return
    taps = theirs["conv1d.weight"][:, 0].reshape(3, 16, 4)
    for number, (short, long) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
        put(f"mixer.{long}", theirs[f"{short}_proj.weight"].T)
        put(f"mixer.{long}_convolution", taps[number].T)
    put("mixer.decay_down", theirs["forget_gate.f_a_proj.weight"].T)
    put("mixer.decay_up", theirs["forget_gate.f_b_proj.weight"].T)
    put("mixer.log_rate", theirs["forget_gate.A_log"])
    put("mixer.decay_bias", theirs["forget_gate.dt_bias"])
    put("mixer.beta", theirs["b_proj.weight"].T)
    put("mixer.output_gate_down", theirs["g_a_proj.weight"].T)
    put("mixer.output_gate_up", theirs["g_b_proj.weight"].T)
    put("mixer.output_norm", theirs["o_norm.weight"])


def put_mlp(put, theirs: dict[str, np.ndarray]) -> None:
    names = ("gate", "up", "down")
    if "gate.weight" not in theirs:
        for name in names:
            put(f"mlp.{name}", theirs[f"{name}_proj.weight"].T)
        return
    put("mlp.router", theirs["gate.weight"].T)
    put("mlp.bias", theirs["gate.e_score_correction_bias"])
    gate_and_up = theirs["experts.gate_up_proj"].transpose(0, 2, 1)
    put("mlp.gate", gate_and_up[..., :16])
    put("mlp.up", gate_and_up[..., 16:])
    put("mlp.down", theirs["experts.down_proj"].transpose(0, 2, 1))
    for name in names:
        put(f"mlp.shared.{name}", theirs[f"shared_experts.{name}_proj.weight"].T)


def test_a_whole_kimi_linear_equals_transformers(one_device, make_batch):
    theirs = their_model()
    random = np.random.default_rng(0)
    tokens = random.integers(3, 64, (2, max(LENGTHS)))
    batch = make_batch(MODEL, rows=2, row_tokens=max(LENGTHS), row_patches=8)
    batch.feature_index[...], batch.patch_segment_ids[...], batch.patch_feature[...] = -1, 0, -1
    loss_weight, segment_ids = np.zeros_like(batch.loss_weight), np.zeros_like(batch.segment_ids)
    for row, length in enumerate(LENGTHS):
        segment_ids[row, :length] = 1
        loss_weight[row, : length - 1] = 1
    targets = np.roll(tokens, -1, axis=1)
    batch = batch._replace(
        tokens=tokens.astype(np.int32),
        targets=targets.astype(np.int32),
        loss_weight=loss_weight,
        segment_ids=segment_ids,
    )
    their_logits = theirs(torch.tensor(tokens), attention_mask=torch.tensor((segment_ids > 0).astype(np.int64))).logits
    supervised = torch.tensor(loss_weight > 0)
    their_loss = torch.nn.functional.cross_entropy(their_logits[supervised], torch.tensor(targets)[supervised])
    their_loss.backward()
    state = {n: t.detach().numpy() for n, t in (*theirs.named_parameters(), *theirs.named_buffers())}
    gradients = {n: state[n] * 0 if t.grad is None else t.grad.numpy() for n, t in theirs.named_parameters()}

    with jax.enable_x64(True):
        definition = define(MODEL)
        arrays = to_ours(state)
        parameters = {path: arrays[path] for path in definition.parameters}
        biases = {path: arrays[path] for path in definition.router_biases}

        def logits(parameters, biases, batch):
            model = definition.assemble(parameters, biases)
            hidden, _ = model(batch)
            return jnp.einsum("bsd,dw->bsw", hidden, use(model.decoder.head, hidden.dtype))

        ours = np.asarray(jax.jit(one_device(logits))(parameters, biases, batch))
        expected = their_logits.detach().numpy()
        is_real = segment_ids > 0
        assert np.abs(ours - expected)[is_real].max() <= 1e-5 * np.abs(expected[is_real]).max()

        mesh = make_mesh(MeshConfig())
        step = jax.jit(make_value_and_gradient(RunConfig(model=MODEL), mesh))
        loss, _, _, our_gradients = step(parameters, biases, place_batch(batch, mesh))
        assert float(loss) == pytest.approx(their_loss.item(), rel=1e-6)
        zero_biases = {n: t * 0 for n, t in state.items() if n.endswith("e_score_correction_bias")}
        expected_gradients = to_ours(gradients | zero_biases)
        for path, gradient in our_gradients.items():
            scale = np.abs(expected_gradients[path]).max()
            # Their delta rule and gates stay in float32: 1.1e-5 of a projection's gradient.
            assert np.abs(np.asarray(gradient) - expected_gradients[path]).max() <= 3e-5 * scale, path
