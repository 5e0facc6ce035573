"""Settings of a model: frozen dataclasses of plain values. No JAX."""

from dataclasses import dataclass, field
from typing import Literal

Float = Literal["bfloat16", "float32", "float64"]
RematResult = Literal["projections", "attention", "experts"]
"""Results of a decoder layer that can be kept for the backward pass."""
LayerKind = tuple[Literal["linear", "full"], Literal["dense", "moe"]]
"""(mixer, MLP) of a decoder layer."""


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
class HyperConnectionConfig:
    """Several residual streams a token (`residual: hyper`)."""

    num_streams: int = 4
    sinkhorn_steps: int = 20
    epsilon: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Linear attention that forgets by head (Qwen3-Next)."""

    num_key_heads: int = 2
    num_value_heads: int = 4
    """A multiple of num_key_heads: each key head serves as many consecutive value heads."""
    key_width: int = 16
    value_width: int = 16
    convolution_width: int = 4
    chunk_tokens: int = 64
    """Tokens that the chunkwise form handles at once."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotation of queries and keys by their position. width=0 rotates nothing."""

    width: int = 0
    """How many entries of a head turn, from its first; even."""
    base: float = 10_000.0
    pairs: Literal["half", "interleaved"] = "half"
    """Entries that turn together: i and i + width / 2, or 2 i and 2 i + 1."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How frequencies are stretched to longer rows than the model was first trained on."""
    factor: float = 1.0
    original_positions: int = 0
    """Longest row of the first training (`llama3` and `yarn`)."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of yarn's ramp to whole pairs."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by this."""
    sections: tuple[int, ...] = ()
    """Pairs that turn by frame, by row and by column of a token; empty turns all by one position."""
    section_order: Literal["blocks", "interleaved"] = "blocks"
    """Sections one after the other, or frame, row, column in turn."""


@dataclass(frozen=True, kw_only=True)
class GroupedAttentionConfig:
    """Softmax attention whose key heads serve equal groups of query heads."""

    num_heads: int = 4
    num_key_heads: int = 2
    head_width: int = 16
    projection_bias: bool = False
    """Queries, keys and values have a bias."""
    output_bias: bool = False
    head_norm: bool = False
    """Queries and keys are normalised head by head before they are rotated."""
    joint_norm: bool = False
    """Queries are normalised over all heads at once before they are rotated, and so are keys."""
    output_gate: Literal["none", "sigmoid"] = "none"
    rotary: RotaryConfig = field(default_factory=lambda: RotaryConfig(width=16))
    query_chunk_tokens: int = 512
    """Queries whose scores exist at one time in the plain-JAX form."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer of DeepSeek sparse attention."""

    stage: Literal["none", "dense", "sparse"] = "none"
    """`none`: no indexer; `dense`: attention sees all keys while the indexer learns; `sparse`: attention sees top_k.

    In both stages the rest of the model goes on learning from its own loss, unless `trained` is `*.indexer`: a warm-up
    trains the indexer alone.
    """
    num_heads: int = 2
    head_width: int = 16
    top_k: int = 2048
    score_dtype: Literal["own", "float8_e4m3fn"] = "own"
    """To select keys, queries and keys are multiplied as they are, or rounded to 8-bit floats, in training as in
    generation. The indexer's loss takes them as they are."""
    loss_coefficient: float = 1.0
    key_norm_bias: bool = True
    key_norm_epsilon: float = 1e-5
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    """Of the indexer's own queries and keys."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionConfig:
    """Multi-head latent attention."""

    num_heads: int = 4
    query_rank: int = 32
    """Latent width of the queries; 0 projects them directly."""
    latent_width: int = 16
    nope_width: int = 16
    """Key width of a head that comes from the latent."""
    shared_key_width: int = 8
    """Key width shared by all heads: what `rotary` turns, if anything (`qk_rope_head_dim` of released configs)."""
    value_width: int = 16
    latent_norm_epsilon: float = 1e-6
    output_gate: Literal["sigmoid", "none"] = "sigmoid"
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    """Width 0 (NoPE), or `shared_key_width`."""
    score_factor: float = 1.0
    """Scores are multiplied by this besides key_width^-1/2."""
    query_chunk_tokens: int = 512
    """Queries whose scores exist at one time in the plain-JAX form."""
    deterministic_gradients: bool = False
    """Kernels of sparse attention sum the gradients of keys in integers: bitwise the same in every run, and slower."""
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
    correction_bias: bool = True
    """The choice looks at scores plus a bias, which balancing moves."""
    sign_rate: float = 1e-3
    quantile_bins: int = 1000
    balance_coefficient: float = 0.0
    """Weight of the loss of uneven choices: of each layer 1 where all experts are taken equally often, else more."""
    balance_over: Literal["batch", "document"] = "batch"
    """Equally often among the tokens of a micro-batch, those of all devices, or among those of each document."""
    z_coefficient: float = 0.0
    """Weight of the mean square of the logarithm of the sum of the router's exponentiated logits."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Stable LatentMoE."""

    num_experts: int = 16
    resident_experts: int = 0
    """Experts with weights of their own, 0 for all; expert e takes those of e mod so many. Times what one of several
    devices computes whose experts get as many rows from the others as its own tokens choose."""
    experts_per_token: int = 4
    expert_width: int = 32
    latent_width: int = 32
    """Width the routed experts work in; 0 lets them work at the model width."""
    latent_norm: bool = True
    num_shared_experts: int = 1
    """Fused into one MLP of num_shared_experts * expert_width; 0 for none."""
    shared_width: int = 0
    """Hidden width of that MLP, if it is another one."""
    shared_gate: Literal["none", "sigmoid"] = "none"
    """Multiply the shared MLP's output by a number of each token's own."""
    num_dense_layers: int = 1
    """The first layers, which have a dense MLP."""
    dense_width: int = 128
    router: RouterConfig = field(default_factory=RouterConfig)
    capacity_factor: float = 2.0
    """Size of the exchange buffer, as a multiple of the mean number of rows that one device sends to another."""
    overflow: Literal["rounds", "drop"] = "rounds"
    """Rows beyond the buffer: sent in further rounds until none is left, or dropped and counted."""
    transport: Literal["all_to_all", "by_node", "ring", "ragged"] = "all_to_all"
    """How rows reach the experts: chosen rows in buffers of one size for each pair of devices; the same, but rows cross
    from node to node once and are shared out there (many experts a token); all rows passed on from device to device
    (few devices, many experts a token); or chosen rows alone, without gaps (GPUs only)."""
    node_devices: int = 8
    """Devices of a node, next to each other in the mesh, for `by_node`. Another number changes times, not results."""
    exchange_chunks: int = 1
    """Equal parts of an exchange: one travels while the experts work on another. Nodes and a ring's steps are parts."""
    expert_axes: Literal["expert", "context_and_expert"] = "expert"
    """The mesh axes that routed experts are spread over."""

    @property
    def num_resident_experts(self) -> int:
        return self.resident_experts or self.num_experts

    def node_members(self, tensor: int) -> int:
        """Devices of a node over which experts are spread: the `tensor` shards of the same tokens lie nearest."""
        return max(1, self.node_devices // tensor)

    @property
    def shared_hidden_width(self) -> int:
        """Hidden width of the MLP that every token takes; 0 for none."""
        return self.num_shared_experts and (self.shared_width or self.num_shared_experts * self.expert_width)

    expert_storage: Literal["dense", "mxfp4"] = "dense"
    """How routed experts rest: as numbers, or frozen in MXFP4, 4.25 bits each, unpacked at use."""


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Gated activation of all MLPs."""

    kind: Literal["situ", "silu", "clipped_silu"] = "situ"
    beta: float = 4.0
    linear_beta: float = 25.0
    """Of `situ`; where `clipped_silu` cuts off what it is given."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Tower that reads pictures, with its projector. num_layers=0 leaves it out (`fuyu` has no layers, and stays)."""

    kind: Literal["moonvit", "clip", "qwen3_vl", "fuyu"] = "moonvit"
    """`moonvit`: Kimi-K3; `clip`: LLaVA; `qwen3_vl`: Qwen3-VL; `fuyu`: patches projected straight to the text width."""
    num_layers: int = 2
    width: int = 64
    num_heads: int = 2
    head_width: int = 32
    """Where pairs rotate by row and column (`moonvit`, `qwen3_vl`), a multiple of 4."""
    hidden_width: int = 128
    patch_pixels: int = 4
    """Side of a square patch."""
    channels: int = 3
    table_rows: int = 8
    table_columns: int = 8
    """Size of the learned position table, in patches; of `clip` the size of every picture or tile."""
    norm_epsilon: float = 2.0**-23
    projector_norm_epsilon: float = 1e-5
    rope_base: float = 10000.0
    activation: Literal["gelu_tanh", "gelu", "quick_gelu"] = "gelu_tanh"
    """Of the layers' MLPs; `quick_gelu` is x sigmoid(1.702 x)."""
    frames_per_patch: int = 1
    """Frames that one patch spans (`qwen3_vl`); a picture repeats its only one."""
    feature_depths: tuple[int, ...] = ()
    """`clip`: after how many layers features are taken; those of several depths are joined."""
    class_feature: Literal["drop", "keep"] = "drop"
    """`clip`: whether the class token is a feature too, before those of the patches."""
    projector_bias: bool = True
    """`clip`: the projector has biases."""
    newline: Literal["none", "learned"] = "none"
    """`clip`: `learned` ends each row of features of a tiled picture, and each untiled picture, with a learned one."""
    tilings: tuple[int, ...] = ()
    """`clip`: rows, columns, rows, columns, ... of the grids of tiles that a picture may be cut into."""
    deep_layers: tuple[int, ...] = ()
    """`qwen3_vl`: 0-based layers of the tower whose outputs are added to the outputs of the first decoder layers."""
    pixel_mean: tuple[float, ...] = ()
    pixel_deviation: tuple[float, ...] = ()
    """Pixels are (x / 255 - mean) / deviation, by channel; empty takes those of the kind's released processor."""
    min_pixels: int = 0
    max_pixels: int = 0
    """A picture is scaled up (`qwen3_vl`) and down (`qwen3_vl`, `moonvit`) to these limits; 0 takes those of the kind's
    released processor."""
    transparency: Literal["white", "chessboard"] = "white"
    """What transparent pictures are laid on: white; or, once they are scaled, Kimi-K3's white and grey squares
    (`moonvit`)."""

    @property
    def is_present(self) -> bool:
        return self.num_layers > 0 or self.kind == "fuyu"

    @property
    def merged_width(self) -> int:
        return 4 * self.width

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        return self.channels * self.frames_per_patch * self.patch_pixels**2

    @property
    def patches_per_feature(self) -> int:
        """Patches that are merged into one feature."""
        return 4 if self.kind in ("moonvit", "qwen3_vl") else 1


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """Whisper's encoder, which hears clips of one length, with its projector. num_layers=0 leaves it out."""

    hears: Literal["sounds", "signals"] = "sounds"
    """Log-mel spectrograms of sounds, or raw signals of several channels, such as EEG."""
    num_layers: int = 0
    width: int = 64
    num_heads: int = 2
    head_width: int = 32
    hidden_width: int = 128
    mel_bins: int = 80
    """Numbers of a frame: bins of a spectrogram, or channels of a signal."""
    clip_frames: int = 3000
    """Frames of a clip; the encoder gives one value for two of them."""
    activation: Literal["gelu_tanh", "gelu", "quick_gelu"] = "gelu"
    norm_epsilon: float = 1e-5
    values_per_feature: int = 5
    """Consecutive values of the encoder that the projector joins into one feature."""
    projector_width: int = 128
    """Width between the projector's two layers."""

    @property
    def is_present(self) -> bool:
        return self.num_layers > 0

    @property
    def clip_values(self) -> int:
        return self.clip_frames // 2

    @property
    def clip_features(self) -> int:
        return self.clip_values // self.values_per_feature


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder with its vision tower."""

    width: int = 64
    num_layers: int = 9
    vocabulary_size: int = 320
    full_attention_layers: tuple[int, ...] = (3, 7, 8)
    """0-based layers that hold full attention; the others hold linear attention."""
    full_attention_kind: Literal["latent", "grouped"] = "latent"
    """Which of `full_attention` (latent) and `grouped_attention` those layers hold."""
    linear_attention_kind: Literal["kimi_delta", "gated_delta_net"] = "kimi_delta"
    """Which of `linear_attention` (Kimi Delta Attention) and `gated_delta_net` the others hold."""
    residual: Literal["attention", "plain", "hyper"] = "attention"
    """How layers' outputs go on: learned mixes over earlier blocks, one running sum, or `hyper_connections`."""
    residual_block_layers: int = 4
    layer_loops: Literal["blocks", "whole"] = "blocks"
    """Layers that repeat run as one loop within their residual block, or across blocks: far fewer layers to compile in
    a deep model, but each mix then reads the places of all sums, and memory for those not finished is taken. In a
    pipeline all stages are one program then, and stages keep the input of each of their layers."""
    norm_epsilon: float = 1e-5
    norm: Literal["rms", "layer"] = "rms"
    """Norms of the decoder: RMSNorm, or LayerNorm with a bias."""
    norm_scale: Literal["plain", "zero_centred"] = "plain"
    """Norms of the decoder multiply by their weight, or by 1 + their weight."""
    dense_mlp: Literal["gated", "relu_squared"] = "gated"
    """Dense MLPs: gated by `activation`, or two projections with relu(x)^2 between them."""
    mlp_bias: bool = False
    """Dense MLPs have biases."""
    tied_head: bool = False
    """The embedding table is the output head too."""
    initializer_range: float = 0.02
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    hyper_connections: HyperConnectionConfig = field(default_factory=HyperConnectionConfig)
    gated_delta_net: GatedDeltaNetConfig = field(default_factory=GatedDeltaNetConfig)
    full_attention: FullAttentionConfig = field(default_factory=FullAttentionConfig)
    grouped_attention: GroupedAttentionConfig = field(default_factory=GroupedAttentionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)
    parameter_dtype: Float = "float32"
    compute_dtype: Float = "float32"
    """Of activations and products. GPUs round what float32 products multiply to 10 bits (TensorFloat-32), unless
    JAX_DEFAULT_MATMUL_PRECISION=highest is set in the environment."""
    remat: Literal["layer", "none"] = "layer"
    """`layer`: keep each decoder layer's input and its routing, compute the rest again in the backward pass.

    Layers of the vision tower are always computed again.
    """
    remat_keep: tuple[str, ...] = ()
    """Results of a layer that `layer` keeps on the device all the same: `projections` (every product with a weight),
    `attention` (what the mixer gives before its output projection), `experts` (what the routed experts give)."""
    remat_offload: tuple[str, ...] = ()
    """Those that it keeps in the host's memory, fetched in the backward pass."""
    pipeline_stages: tuple[int, ...] = ()
    """Layers of each stage, in order, on a mesh with `pipe` above 1; empty shares out FLOPs evenly."""
    pipeline_chunks: int = 1
    """Stages that each device of the `pipe` axis holds: 1, or more with the schedule `interleaved`."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""


def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """(mixer, MLP) of each decoder layer, 0-based."""
    return tuple(
        (
            "full" if layer in model.full_attention_layers else "linear",
            "dense" if layer < model.moe.num_dense_layers else "moe",
        )
        for layer in range(model.num_layers)
    )
