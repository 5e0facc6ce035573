"""Every setting of a run: frozen dataclasses of plain values. No JAX."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mmjax import axes

Float = Literal["bfloat16", "float32", "float64"]
LayerKind = tuple[Literal["linear", "full"], Literal["dense", "moe"]]
"""(mixer, MLP) of a decoder layer."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the six mesh axes, slowest link first. At most one may be -1: all devices that are left."""

    pipe: int = 1
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in axes.MESH_AXES}

    @property
    def num_devices(self) -> int:
        """Product of the axes; meaningful once no axis is -1."""
        total = 1
        for size in self.sizes.values():
            total *= size
        return total

    @property
    def num_row_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.replica * self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Kimi Delta Attention."""

    num_heads: int = 4
    key_width: int = 16
    value_width: int = 16
    convolution_width: int = 4
    decay: Literal["bounded", "softplus"] = "bounded"
    """`bounded`: lower_bound * sigmoid(e^A z) (Kimi-K3); `softplus`: -e^A softplus(z) (Kimi-Linear)."""
    decay_lower_bound: float = -5.0
    decay_rank: int = 16
    """Width between the two projections of the decay."""
    output_gate: Literal["full", "low_rank"] = "full"
    output_gate_rank: int = 16
    """Width between the two projections of a `low_rank` output gate."""
    chunk_tokens: int = 64
    """Tokens that the chunkwise form handles at once."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer of DeepSeek sparse attention."""

    stage: Literal["none", "dense", "sparse"] = "none"
    """`none`: no indexer; `dense`: attention sees all keys while the indexer learns; `sparse`: attention sees top_k.

    In both stages the rest of the model goes on learning from its own loss; nothing is frozen.
    """
    num_heads: int = 2
    head_width: int = 16
    top_k: int = 2048
    loss_coefficient: float = 1.0
    key_norm_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class FullAttentionConfig:
    """Multi-head latent attention without rotation (NoPE)."""

    num_heads: int = 4
    query_rank: int = 32
    """Latent width of the queries; 0 projects them directly."""
    latent_width: int = 16
    nope_width: int = 16
    """Key width of a head that comes from the latent."""
    shared_key_width: int = 8
    """Key width shared by all heads (`qk_rope_head_dim` of released configs; never rotated here)."""
    value_width: int = 16
    latent_norm_epsilon: float = 1e-6
    output_gate: Literal["sigmoid", "none"] = "sigmoid"
    query_chunk_tokens: int = 512
    """Queries whose scores exist at one time in the plain-JAX form."""
    indexer: IndexerConfig = field(default_factory=IndexerConfig)

    @property
    def key_width(self) -> int:
        return self.nope_width + self.shared_key_width


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts, and how the load is balanced."""

    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    num_groups: int = 1
    top_groups: int = 1
    """Of num_groups groups of experts, only the best top_groups of a token may be taken."""
    renormalise: bool = True
    scale: float = 1.0
    balancing: Literal["quantile", "sign", "none"] = "quantile"
    sign_rate: float = 1e-3
    quantile_bins: int = 1000


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Stable LatentMoE."""

    num_experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 32
    latent_width: int = 32
    """Width the routed experts work in; 0 lets them work at the model width."""
    latent_norm: bool = True
    num_shared_experts: int = 1
    """Fused into one MLP of num_shared_experts * expert_width; 0 for none."""
    num_dense_layers: int = 1
    """The first layers, which have a dense MLP."""
    dense_width: int = 128
    router: RouterConfig = field(default_factory=RouterConfig)
    capacity_factor: float = 2.0
    """Size of the exchange buffer, as a multiple of the mean number of rows that one device sends to another."""
    overflow: Literal["rounds", "drop"] = "rounds"
    """Rows beyond the buffer: sent in further rounds until none is left, or dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Gated activation of all MLPs."""

    kind: Literal["situ", "silu"] = "situ"
    beta: float = 4.0
    linear_beta: float = 25.0


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 tower with patch merge and projector. num_layers=0 leaves the tower out."""

    num_layers: int = 2
    width: int = 64
    num_heads: int = 2
    head_width: int = 32
    """A multiple of 4: rotary pairs alternate between columns and rows."""
    hidden_width: int = 128
    patch_pixels: int = 4
    """Side of a square patch."""
    channels: int = 3
    table_rows: int = 8
    table_columns: int = 8
    """Size of the learned position table, in patches."""
    norm_epsilon: float = 2.0**-23
    projector_norm_epsilon: float = 1e-5
    rope_base: float = 10000.0

    @property
    def is_present(self) -> bool:
        return self.num_layers > 0

    @property
    def merged_width(self) -> int:
        return 4 * self.width


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder with its vision tower."""

    width: int = 64
    num_layers: int = 9
    vocabulary_size: int = 320
    full_attention_layers: tuple[int, ...] = (3, 7, 8)
    """0-based layers that hold full (latent) attention; the others hold linear attention."""
    residual: Literal["attention", "plain"] = "attention"
    residual_block_layers: int = 4
    norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    full_attention: FullAttentionConfig = field(default_factory=FullAttentionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    parameter_dtype: Float = "float32"
    compute_dtype: Float = "float32"
    remat: Literal["layer", "none"] = "layer"
    """`layer`: keep each decoder layer's input and its routing, compute the rest again in the backward pass.

    Layers of the vision tower are always computed again.
    """
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they become batches."""

    source: str = "digits"
    """`digits` (scikit-learn's digits in 2x2 grids, with questions) or the path of a JSONL of conversations."""
    eval_source: str = ""
    """Held-out samples: a path; empty takes the held-out part of `digits`, or no evaluation for a JSONL."""
    media_root: str = ""
    """Folder that image paths are relative to and confined to; empty is the JSONL's own folder."""
    tokenizer: str = "bytes"
    """`bytes` or the path of a `tokenizer.json`."""
    image_token: str = "<|media_pad|>"
    """Token of a `tokenizer.json` that stands for one merged image patch."""
    end_token: str = "<|end_of_msg|>"
    """Token of a `tokenizer.json` that ends an answer."""
    rows: int = 16
    """Rows (packed sequences) of one step, over all devices and micro-batches."""
    row_tokens: int = 256
    row_patches: int = 256
    """Positions, and image patches before the merge, of one row."""
    image_max_patches: int = 256
    """An image with more patches is scaled down to this many."""
    image_max_pixels: int = 50_000_000
    """An image file that declares more pixels is refused before it is decoded."""
    images: Literal["keep", "blank"] = "keep"
    """`blank` replaces every picture by grey: what the text alone can tell."""
    too_long: Literal["error", "drop"] = "error"
    """A sample that does not fit a row: stop, or drop it and count it."""
    bad_sample: Literal["error", "skip"] = "error"
    """A record that cannot be read: stop, or skip it and count it."""
    packing_window: int = 64
    """Samples among which rows are packed; the order of samples is shuffled over the whole source."""
    prefetch_batches: int = 2
    """Batches made ahead of the step."""
    eval_samples: int = 256


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices with AdamW for the rest; linear warm-up, then cosine."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    final_learning_rate_fraction: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_heads: Literal["per_head", "whole"] = "per_head"
    """Orthogonalise each head's block of a projection, or the projection as one matrix."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every_steps: int = 100
    """0 saves at the end only."""
    keep_last: int = 3
    keep_best: bool = True
    """Also keep the step with the best evaluation."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = 100
    accumulation: int = 1
    """Micro-batches that the rows of a step are split into, one after the other."""
    eval_every_steps: int = 100
    """0 evaluates at the end only."""
    log_every_steps: int = 1
    max_nonfinite_steps: int = 5
    """Steps in a row whose loss or gradient may be non-finite (each is skipped) before the run stops."""
    compilation_cache: str = ""
    """Folder of JAX's persistent compilation cache; empty uses none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `run_dir` holds everything it writes; the same run_dir again resumes."""

    run_dir: str = "runs/default"
    seed: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """(mixer, MLP) of each decoder layer, 0-based."""
    return tuple(
        (
            "full" if layer in model.full_attention_layers else "linear",
            "dense" if layer < model.moe.num_dense_layers else "moe",
        )
        for layer in range(model.num_layers)
    )


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> MeshConfig:
    """Replace an axis of size -1 by the devices that the other axes leave."""
    open_axes = [name for name, size in mesh.sizes.items() if size == -1]
    if not open_axes:
        return mesh
    others = 1
    for name, size in mesh.sizes.items():
        others *= 1 if name in open_axes else size
    return dataclasses.replace(mesh, **{open_axes[0]: max(1, num_devices // max(1, others))})
