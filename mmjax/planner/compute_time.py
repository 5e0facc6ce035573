"""Seconds that one device computes in a step, by part of the model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mmjax.config import ModelConfig, RunConfig, layer_kinds
from mmjax.planner.adapters import Tuning
from mmjax.planner.cost import (
    adapter_forward_flops,
    forward_flops,
    training_flops,
    vision_forward_flops,
    vision_training_flops,
)
from mmjax.planner.elementwise import adapter_bytes, cast_bytes, patch_bytes, token_bytes
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import keeps_layers, num_expert_devices
from mmjax.planner.parameters import ITEM_BYTES, PACKED_BYTES, Shard

# Share of the bfloat16 peak that each part reaches, forward and backward together. Read on one H200, from the kernels
# that others publish: cuBLAS 743 TFLOP/s, cuDNN attention 523, sparse attention 431, indexer 470, grouped expert
# products 530 (packed ones 0.84 of that), chunked cross-entropy 645, chunked KDA 53, attention residuals 6.7. Float32
# products of routers are three of bfloat16.
PEER_SHARES = {
    "linear attention projections": 0.75,
    "linear attention recurrence": 0.054,
    "full attention projections": 0.75,
    "full attention scores": 0.53,
    "selected attention scores": 0.44,
    "indexer": 0.47,
    "router": 0.25,
    "latent projections": 0.75,
    "routed experts": 0.53,
    "packed experts": 0.45,
    "shared experts": 0.75,
    "dense MLP": 0.75,
    "attention residuals": 0.0068,
    "hyper connections": 0.0068,
    "head": 0.65,
    "adapters": 0.25,
    "vision": 0.60,
}
_WHOLE_ON_EACH_DEVICE = ("router", "latent projections", "indexer", "attention residuals", "hyper connections")
# What a layer that is computed again leaves out: the last product of an MLP only makes the layer's result.
_AGAIN = {"dense MLP": 2 / 3, "shared experts": 2 / 3, "latent projections": 1 / 2}
# What is not computed again where products with weights are kept. Kept results of attention save nothing: what the
# backward passes of its kernels take besides, their forward passes make.
_KEPT_PRODUCTS = (
    "linear attention projections",
    "full attention projections",
    "latent projections",
    "shared experts",
    "dense MLP",
)
BETWEEN = "between products"
"""The part that moves bytes and multiplies nothing: `elementwise`."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What fits replace: shares of the peak, and how much of an exchange hides."""

    shares: Mapping[str, float] = field(default_factory=lambda: PEER_SHARES)
    overlap: float = 0.0
    """Share of the computing time under which gathers of weights and scatters of gradients hide. XLA hides none unless
    it is asked to (JAX_OPTIMIZATION_LEVEL=O1)."""
    memory: float = 0.9
    """Share of the memory's published bandwidth that operations between products reach: 4.3 of 4.8 TB/s of an H200."""
    exchange: float = 1.0
    """Factor of all times of exchanges."""


@dataclass(frozen=True)
class PartSeconds:
    """One part of the model on one device in a step."""

    forward: float
    backward: float
    recompute: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute


def share_again(config: RunConfig, part: str, kept: Collection[str]) -> float:
    """Share of a part's forward pass that a layer which is computed again runs, where the results `kept` are kept."""
    model = config.model
    if part in _KEPT_PRODUCTS and "projections" in kept:
        return 0.0
    if part == "routed experts":
        # Their last product gives the kept result, or the layer's own where no projection follows it. Where rows are
        # exchanged, it gives the gradients of their weights besides.
        is_last_left_out = "experts" in kept or not model.moe.latent_width
        return 2 / 3 if is_last_left_out and num_expert_devices(config) == 1 else 1.0
    return 1 / 2 if part == "dense MLP" and model.dense_mlp != "gated" else _AGAIN.get(part, 1.0)


class ComputeClock:
    """Times of one model's parts on one kind of GPU; what does not depend on the mesh is counted once."""

    def __init__(self, config: RunConfig, cluster: Cluster, tuning: Tuning, rates: Rates):
        self.gpu, self.tuning, self.rates = cluster.gpu, tuning, rates
        model, row_tokens = config.model, config.data.row_tokens
        self.forward = forward_flops(model, row_tokens)
        self.training = training_flops(model, row_tokens, tuning)
        if tuning.kind == "lora":
            self.forward["adapters"] = adapter_forward_flops(model, tuning)
        self.vision_forward = vision_forward_flops(model, config.data.image_max_patches)
        self.vision_training = vision_training_flops(model, config.data.image_max_patches, tuning)
        self.repeated = repeated_shares(model)
        self._of_mesh: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._token_bytes: dict[int, float] = {}
        self._patch_bytes = patch_bytes(model) if config.data.row_patches and model.vision.is_present else 0.0
        indexer = model.full_attention.indexer
        is_sparse = model.full_attention_kind == "latent" and indexer.stage == "sparse"
        self.selects = is_sparse and row_tokens > indexer.top_k

    def parts(self, config: RunConfig, held: Sequence[Shard]) -> dict[str, PartSeconds]:
        """Seconds of each part in a step of `config` (all its micro-batches).

            forward    FLOPs / (share of the peak * peak); experts at least the bytes of their weights, adapters at
                       least those of what they read and write, over the memory's bandwidth
            backward   the same with the FLOPs of training less those of forward
            recompute  decoder layers once under remat, without what is kept and what only made their results, and once
                       more in a pipeline whose stages keep their input alone; the tower, where it is trained through

        What moves bytes between products takes them forward once, backward twice.
        """
        mesh, model, peak = config.mesh, config.model, self.gpu.flops_per_second
        positions = config.data.rows * config.data.row_tokens / (mesh.num_row_shards * mesh.context * mesh.pipe)
        patches = config.data.rows * config.data.row_patches / (mesh.num_row_shards * mesh.pipe)
        expert_weights, adapter_reads, casts = self._bytes_of(config, held)
        is_again, is_staged = model.remat == "layer", mesh.pipe > 1 and not keeps_layers(model)
        kept = {*model.remat_keep, *model.remat_offload}
        memory = self.rates.memory * self.gpu.memory_bandwidth
        found: dict[str, PartSeconds] = {}
        for part, flops in self.forward.items():
            if not flops:
                continue
            repeated = self.repeated.get(part, 0.0)
            share = repeated + (1 - repeated) / mesh.tensor
            seconds_per_flop = positions * share / (peak * self._rate(part))
            forward = flops * seconds_per_flop
            backward = (self.training[part] - flops) * seconds_per_flop
            if part == "routed experts":
                floor = config.training.accumulation * expert_weights / self.gpu.memory_bandwidth
                backward = max(backward, 2 * floor if self.tuning.kind == "full" else floor)
                forward = max(forward, floor)
            if part == "adapters":
                # A stage's own adapters, of all positions that pass it.
                least = positions * mesh.pipe * adapter_reads / memory
                forward, backward = max(forward, least), max(backward, 2 * least)
            again = is_again * share_again(config, part, kept) + is_staged
            found[part] = PartSeconds(forward, backward, forward * again if part != "head" else 0.0)
        # The tower runs whole on every device of the tensor and context axes.
        per_flop = patches / (peak * self._rate("vision"))
        trained = self.vision_training - self.vision_forward
        if self.vision_forward and patches:
            again = self.vision_forward * per_flop if trained else 0.0
            found["vision"] = PartSeconds(self.vision_forward * per_flop, trained * per_flop, again)
        if mesh.tensor not in self._token_bytes:
            self._token_bytes[mesh.tensor] = token_bytes(model, mesh.tensor)
        weights = config.training.accumulation * casts / memory
        layers = positions * self._token_bytes[mesh.tensor] / memory + weights
        tower = patches * self._patch_bytes / memory
        through = tower if trained else 0.0
        found[BETWEEN] = PartSeconds(
            layers + tower, 2 * layers - weights + 2 * through, layers * (is_again + is_staged) + through
        )
        return found

    def _rate(self, part: str) -> float:
        if part == "full attention scores" and self.selects:
            part = "selected attention scores"
        if part == "routed experts" and self.tuning.kind == "lora" and self.tuning.experts_at_rest == "mxfp4":
            part = "packed experts"
        return self.rates.shares[part]

    def _bytes_of(self, config: RunConfig, held: Sequence[Shard]) -> tuple[float, float, float]:
        """(this device's gathered experts, packed if they are; a position's in adapters; casts of weights), once."""
        key = (config.mesh, config.model.moe.expert_axes)
        if key not in self._of_mesh:
            item = ITEM_BYTES[config.model.compute_dtype]
            experts = sum(
                shard.used_entries * (PACKED_BYTES if shard.array.is_packed else item)
                for shard in held
                if shard.array.part == "routed experts"
            )
            self._of_mesh = {key: (experts, adapter_bytes(config.model, held), cast_bytes(config, held))}
        return self._of_mesh[key]


def repeated_shares(model: ModelConfig) -> dict[str, float]:
    """Share of each part's FLOPs that every device of the tensor axis repeats: narrow projections, routers, indexer."""
    linear, full, width = model.linear_attention, model.full_attention, model.width
    flops = forward_flops(model, 1)
    kinds = layer_kinds(model)
    num_linear = sum(mixer == "linear" for mixer, _ in kinds)
    narrow_linear = linear.decay_rank + (linear.output_gate_rank if linear.output_gate == "low_rank" else 0)
    if model.linear_attention_kind == "gated_delta_net":
        narrow_linear = 0
    is_latent = model.full_attention_kind == "latent"
    narrow_full = full.query_rank + full.latent_width + full.shared_key_width if is_latent else 0
    narrow = {
        "linear attention projections": num_linear * 2 * width * narrow_linear,
        "full attention projections": (len(kinds) - num_linear) * 2 * width * narrow_full,
    }
    whole = dict.fromkeys(_WHOLE_ON_EACH_DEVICE, 1.0)
    return whole | {part: value / flops[part] for part, value in narrow.items() if flops[part]}
