"""Bytes that each device of a mesh holds during a step: at rest exactly, in flight by estimate."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmjax import axes
from mmjax.config import LayerKind, ModelConfig, MoeConfig, RunConfig, layer_kinds
from mmjax.planner.adapters import FULL, Tuning, trained_arrays
from mmjax.planner.parameters import ITEM_BYTES, PACKED_BYTES, ParameterArray, Shard, shards, wide
from mmjax.planner.schedules import ScheduleCost, schedule_cost

_INT32 = 4
# Hidden width of experts up to which kernels fetch rows from their tokens' places instead of sorting copies of them.
_WIDEST_FETCHED = 768
# Of a head's width, what kernels of linear attention need in a step beside their arguments: docs/benchmarks.md.
_KERNEL_COPIES = {"kimi_delta": 11, "gated_delta_net": 13}


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes on the fullest device, by what they are for."""

    parameters: float
    """At rest, correction biases included."""
    optimizer: float
    """Moments; a few counters are left out."""
    batch: float
    """This device's rows of a whole step."""
    gradients: float
    """As they are summed over micro-batches, in at least float32."""
    micro_batch_gradients: float
    """Of the micro-batch at work, before they are added to the sum; none where it is the only one."""
    saved_activations: float
    """What the backward pass of one micro-batch finds: inputs and decisions of layers, or all intermediate values."""
    gathered_weights: float
    """The largest set of weights gathered at one time, and their gradients where they are trained."""
    working_set: float
    """Intermediate values of the layer (or the chunk of the loss) at work, exchange buffers left out."""
    exchange_buffers: float
    """Rows on their way to experts and back, in one layer."""

    @property
    def arguments(self) -> float:
        """What a step is given: state and batch."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> float:
        """Peak of a step, as if all of it were held at one time."""
        return (
            self.arguments
            + self.gradients
            + self.micro_batch_gradients
            + self.saved_activations
            + self.gathered_weights
            + self.working_set
            + self.exchange_buffers
        )


def device_bytes(config: RunConfig, tuning: Tuning = FULL) -> DeviceBytes:
    """Bytes of a step of `config` on its mesh."""
    arrays = trained_arrays(config.model, tuning)
    return bytes_of_shards(config, shards(arrays, config.mesh, config.model.pipeline_stages))


def bytes_of_shards(config: RunConfig, held: Sequence[Shard]) -> DeviceBytes:
    """Bytes of a step of `config`, whose model's arrays rest as `held` on its mesh.

    At rest: entries of the shard * bytes an entry (MXFP4: 17/32), summed over arrays. Gradients: trained entries * at
    least 4. AdamW: 2 moments; Muon: 1 for matrices, 2 for the rest.

    In flight: see each function below. These are estimates of what one micro-batch needs at its worst moment; XLA may
    need less by reusing buffers early, or more by its own temporaries.
    """
    flight = InFlight(config)
    slots = device_slots(config)

    def layers(shard: Shard) -> float:
        """Places over layers that a device works on."""
        if not slots or not shard.array.in_decoder_layer:
            return 1.0
        return slots[_LAYER_OF[shard.array.adapted_part or shard.array.part]] / shard.num_layers

    trained = [(shard.array, layers(shard) * shard.rest_entries) for shard in held if shard.array.is_trained]
    return DeviceBytes(
        parameters=sum(layers(shard) * shard.rest_bytes for shard in held),
        optimizer=sum(
            num_moments(array, config.optimizer.name) * entries * ITEM_BYTES[array.dtype] for array, entries in trained
        ),
        batch=config.data.rows / config.mesh.num_row_shards * row_bytes(config),
        gradients=sum(entries * ITEM_BYTES[wide(array.dtype)] for array, entries in trained),
        micro_batch_gradients=sum(entries * ITEM_BYTES[array.dtype] for array, entries in trained)
        if config.training.accumulation > 1
        else 0.0,
        saved_activations=flight.saved_activations() + kept_weight_bytes(config, held),
        gathered_weights=gathered_weight_bytes(config, held),
        working_set=flight.largest_working_set(),
        exchange_buffers=flight.exchange_buffers(),
    )


def num_moments(array: ParameterArray, optimizer: str) -> int:
    """How many numbers the optimizer keeps for each entry."""
    return 1 if optimizer == "muon" and array.is_matrix else 2


def row_bytes(config: RunConfig) -> float:
    """Bytes of one row of a batch on a device: positions are split over context, patches and clips are not.

    Position: tokens, targets, loss weight, segment, position, feature of a picture and of a sound, 4 bytes each. Patch:
    float32 pixels, segment, 3 of position, 3 of grid. Feature: 4. Clip: float32 spectrogram.
    """
    vision, audio = config.model.vision, config.model.audio
    patch = 4 * (vision.patch_values + 1 + 3 + 3) + 4 / 4
    clips = 4 * audio.clip_frames * audio.mel_bins * config.data.row_clips if audio.is_present else 0
    return 28 * config.data.row_tokens / config.mesh.context + patch * config.data.row_patches + clips


# Which kind of layer the arrays of a part belong to.
_LAYER_OF = {
    "linear attention": "linear",
    "full attention": "full",
    "indexer": "full",
    "router": "moe",
    "latent projections": "moe",
    "routed experts": "moe",
    "shared experts": "moe",
    "dense MLP": "dense",
    "norms and mixes": "all",
    "vision": "vision",
    "audio": "vision",
    "projector": "vision",
}


def gathered_weight_bytes(config: RunConfig, held: Sequence[Shard]) -> float:
    """Bytes of the gathered weights and their gradients at the worst moment.

        a layer   all its weights in the compute dtype, the gradient of its largest array in the dtype at rest, and the
                  head's whole gradient, which waits while layers go backward
        a table   the embedding as it rests and its gradient; the head in the compute dtype and its gradient

    What rests whole in the compute dtype is used where it rests. Packed experts are gathered packed, and are there once
    more, in the order in which Hopper's kernels unpack them a tile at a time; pipelines of one program have two copies.
    """
    model = config.model
    compute = ITEM_BYTES[model.compute_dtype]
    kinds = ("vision", "linear", "full", "moe", "dense", "all")
    layers: dict[str, float] = dict.fromkeys(kinds, 0.0)
    gradients: dict[str, float] = dict.fromkeys(kinds, 0.0)
    largest_table = head_gradient = 0.0
    for shard in held:
        array = shard.array
        rest, used = ITEM_BYTES[array.dtype], shard.used_entries / shard.num_layers
        item = rest if array.name == "embedding" else compute
        if shard.gather_factor == 1 and item == rest:
            item = 0
        if array.is_packed:
            # One program for all stages takes a layer's out of the stack, forward and backward.
            taken = 2 if config.mesh.pipe > 1 and keeps_layers(model) else 0
            item = ((2 if shard.gather_factor > 1 else 1) + taken) * PACKED_BYTES
        gradient = used * rest if array.is_trained else 0.0
        if array.part == "tables":
            largest_table = max(largest_table, used * item + gradient)
            if array.name == "head" and shard.gather_factor > 1:
                head_gradient = gradient
        elif array.part != "adapters":
            kind = _LAYER_OF[array.part]
            layers[kind] += used * item
            gradients[kind] = max(gradients[kind], gradient)

    def of_layer(*parts: str) -> float:
        return sum(layers[part] for part in parts) + max(gradients[part] for part in parts)

    decoder = [of_layer(mixer, mlp, "all") for mixer, mlp in kind_counts(model)]
    return max([largest_table, *(size + head_gradient for size in (of_layer("vision"), *decoder))])


def device_slots(config: RunConfig) -> dict[str, int]:
    """Of a pipeline: how many layers with each of a layer's parts a device has places for; else nothing.

    Arrays of one kind of layer (mixer, MLP) lie in as many places on every device as the one with most needs.
    """
    model, pipe = config.model, config.mesh.pipe
    if pipe == 1:
        return {}
    return _device_slots(
        model.num_layers, model.full_attention_layers, model.moe.num_dense_layers, pipe, model.pipeline_stages
    )


@functools.lru_cache(maxsize=256)
def _device_slots(
    num_layers: int, full: tuple[int, ...], num_dense: int, pipe: int, stages: tuple[int, ...]
) -> dict[str, int]:
    moe = MoeConfig(num_dense_layers=num_dense)
    kinds = layer_kinds(ModelConfig(num_layers=num_layers, full_attention_layers=full, moe=moe))
    stages = stages or tuple((number + 1) * num_layers // pipe - number * num_layers // pipe for number in range(pipe))
    most: Counter[LayerKind] = Counter()
    devices: list[Counter[LayerKind]] = [Counter() for _ in range(pipe)]
    begin = 0
    for number, size in enumerate(stages):
        devices[number % pipe].update(kinds[begin : begin + size])
        begin += size
    for device in devices:
        most |= device
    found = {part: sum(most[kind] for kind in most if part in kind) for part in ("linear", "full", "moe", "dense")}
    return found | {"all": sum(most.values())}


def kept_weight_bytes(config: RunConfig, held: Sequence[Shard]) -> float:
    """Without remat the backward pass finds every decoder layer's weights as they were gathered; else 0."""
    if config.model.remat == "layer":
        return 0.0
    item = ITEM_BYTES[config.model.compute_dtype]
    return sum(
        shard.used_entries * (PACKED_BYTES if shard.array.is_packed else item)
        for shard in held
        if shard.array.in_decoder_layer and shard.gather_factor > 1
    )


def keeps_layers(model: ModelConfig) -> bool:
    """Whether stages of a pipeline keep the input of each of their layers and do not run again."""
    return model.layer_loops == "whole" and not model.vision.deep_layers


def num_expert_devices(config: RunConfig) -> int:
    """How many devices routed experts are spread over."""
    return math.prod(getattr(config.mesh, axis) for axis in axes.MESH_AXES_OF_EXPERTS[config.model.moe.expert_axes])


def kind_counts(model: ModelConfig) -> Mapping[LayerKind, int]:
    """How many decoder layers there are of each kind."""
    return _kind_counts(model.num_layers, model.full_attention_layers, model.moe.num_dense_layers)


@functools.lru_cache(maxsize=64)
def _kind_counts(num_layers: int, full: tuple[int, ...], num_dense: int) -> Mapping[LayerKind, int]:
    moe = MoeConfig(num_dense_layers=num_dense)
    return Counter(layer_kinds(ModelConfig(num_layers=num_layers, full_attention_layers=full, moe=moe)))


class InFlight:
    """Bytes of one micro-batch on one device while a step runs.

    t = rows of the micro-batch on the device * positions of a row on the device; c = bytes of the compute dtype;
    w = at least 4; heads, hidden widths and the vocabulary are divided by the tensor axis.
    """

    def __init__(self, config: RunConfig):
        mesh, model = config.mesh, config.model
        self.config, self.model, self.mesh = config, model, mesh
        self.rows = config.data.rows / (mesh.num_row_shards * config.training.accumulation)
        self.row_tokens = config.data.row_tokens / mesh.context
        self.tokens = self.rows * self.row_tokens
        self.patches = self.rows * config.data.row_patches if model.vision.is_present else 0.0
        self.compute = ITEM_BYTES[model.compute_dtype]
        self.wide = ITEM_BYTES[wide(model.compute_dtype)]
        self.kinds = kind_counts(model)
        self.num_streams = model.hyper_connections.num_streams if model.residual == "hyper" else 1
        self.stage_layers = -(-model.num_layers // mesh.pipe)
        self._worst_layer: tuple[float, float] | None = None
        self._kept_by_layers: float | None = None

    def saved_activations(self) -> float:
        """What layers keep; the sum of each residual block and its gradient, at least float32.

        The tower always keeps its layers' inputs only. A pipeline keeps no
        more than the inputs of its stages for further micro-batches.
        """
        model, width = self.model, self.model.width
        num_blocks = -(-model.num_layers // model.residual_block_layers) if model.residual == "attention" else 0
        blocks = num_blocks * self.tokens * width * (self.compute + self.wide)
        layers = self.kept_by_layers() + blocks + 2 * self.tokens * width * self.compute
        tower = model.vision.num_layers * self.patches * model.vision.width * self.compute
        vision = model.vision
        merged, per_feature = vision.width * vision.patches_per_feature, vision.patches_per_feature
        # Between a projector's two products: as wide as what it joins, or (CLIP) as the model.
        projected = merged + 3 * width if vision.kind == "clip" else 2 * merged + width
        features = self.patches / per_feature * projected * self.compute
        return layers + self.kept_inputs() + tower + features

    def kept_by_layers(self) -> float:
        """Of a stage's layers for one micro-batch: t D c a layer and residual stream, expert choices, and selected keys
        (all int32); without remat all intermediate values too."""
        model = self.model
        share = self.stage_layers / model.num_layers
        decisions = 0.0
        for (mixer, mlp), number in self.kinds.items():
            if mlp == "moe":
                decisions += number * self.tokens * (model.moe.experts_per_token * _INT32 + self.wide)
            if mixer == "full" and self._selects():
                decisions += number * self.tokens * model.full_attention.indexer.top_k * _INT32
        streams = model.num_layers * self.num_streams * self.tokens * model.width * self.compute
        values = 0.0
        if model.remat == "none":
            values = sum(number * self.layer_values(*kind) for kind, number in self.kinds.items())
        return share * (streams + decisions + values)

    def kept_inputs(self) -> float:
        """Of a pipeline: inputs of stages that its schedule keeps, and 5 more that are on their way; where stages do
        not run again, what all their layers keep instead; with shared edges the embeddings of all micro-batches."""
        training = self.config.training
        return self.kept_inputs_of(schedule_cost(self.config), training.pipeline_edges)

    def kept_inputs_of(self, cost: ScheduleCost, edges: str) -> float:
        """The same for another schedule."""
        if self.mesh.pipe == 1:
            return 0.0
        model = self.model
        num_blocks = -(-model.num_layers // model.residual_block_layers) if model.residual == "attention" else 0
        message = (self.num_streams + num_blocks) * self.tokens * model.width * self.compute
        embedded = self.config.training.accumulation * self.tokens * model.width * self.compute
        if self._kept_by_layers is None and keeps_layers(model):
            self._kept_by_layers = self.kept_by_layers()
        if self._kept_by_layers is None:
            kept = cost.num_inputs * message
        else:
            # A chunk has its share of the device's layers; one micro-batch is counted with the layers.
            kept = (cost.num_kept / cost.num_chunks - 1) * self._kept_by_layers
        return kept + 5 * message + (embedded if edges == "data_parallel" else 0.0)

    def largest_working_set(self) -> float:
        """The most that one layer without its exchange, one chunk of the loss or one layer of the tower needs, with
        its gradients."""
        return self._worst()[0]

    def exchange_buffers(self) -> float:
        """Rows on their way in the layer that needs most."""
        return self._worst()[1]

    def _worst(self) -> tuple[float, float]:
        if self._worst_layer is None:
            layers = [self.layer_working_set(mixer, mlp) for mixer, mlp in self.kinds]
            others = [(self.loss_working_set(), 0.0), (self.tower_working_set(), 0.0)]
            self._worst_layer = max([*layers, *others], key=sum)
        return self._worst_layer

    def layer_working_set(self, mixer: str, mlp: str) -> tuple[float, float]:
        """(intermediate values of one decoder layer in its own backward pass, rows of its exchange on their way).

        4 streams + max(what the mixer keeps + the MLP's worst moment, the mixer's worst moment)
        """
        residual = 4 * self.num_streams * self.tokens * self.model.width * self.compute
        kept, mixing = self._mixer(mixer)
        mlp_values, exchange = self._experts() if mlp == "moe" else (2 * self._mlp(self.model.moe.dense_width), 0.0)
        if mixing >= kept + mlp_values + exchange:
            return residual + mixing, 0.0
        return residual + kept + mlp_values, exchange

    def layer_values(self, mixer: str, mlp: str) -> float:
        """What a layer keeps for its backward pass if it is not computed again: half of an MLP's worst moment."""
        mlp_values, exchange = self._experts() if mlp == "moe" else (2 * self._mlp(self.model.moe.dense_width), 0.0)
        residual = 4 * self.num_streams * self.tokens * self.model.width * self.compute
        return residual + self._mixer(mixer)[0] + (mlp_values + exchange) / 2

    def _mixer(self, mixer: str) -> tuple[float, float]:
        """(what a mixer keeps for its backward pass, the most that it needs then)."""
        if mixer == "linear":
            return (
                self._linear_attention()
                if self.model.linear_attention_kind == "kimi_delta"
                else self._gated_delta_net()
            )
        if self.model.full_attention_kind == "grouped":
            values, scores = self._grouped_attention_parts()
            return values, 2 * values + 4 * scores
        return self._full_attention()

    def exchanged_rows(self) -> float:
        """Rows that a device sends in one exchange: in buffers, filled or not,

            n * capacity,   capacity = ceil(capacity_factor * t * A / n)

        and t * A where only chosen rows are sent, or where nothing is.
        """
        moe, devices = self.model.moe, num_expert_devices(self.config)
        choices = self.tokens * moe.experts_per_token
        if devices == 1 or moe.transport == "ragged":
            return choices
        return devices * min(choices, math.ceil(moe.capacity_factor * choices / devices))

    def loss_working_set(self) -> float:
        """Logits of one chunk and their gradient: 2 chunk W w; and the hidden values' gradient t D w."""
        chunk = min(self.model.loss_chunk_tokens, self.tokens)
        vocabulary = self.model.vocabulary_size / self.mesh.tensor
        return 2 * chunk * vocabulary * self.wide + self.tokens * self.model.width * self.wide

    def tower_working_set(self) -> float:
        """One layer of the tower: q, k, v and their turned forms, scores of a chunk of queries, the MLP; twice."""
        vision = self.model.vision
        heads = vision.num_heads * vision.head_width
        values = self.patches * (5 * heads * self.wide + 2 * vision.hidden_width * self.compute)
        scores = self.rows * vision.num_heads * min(512, self.config.data.row_patches) * self.config.data.row_patches
        return 2 * (values + scores * self.wide) if self.patches else 0.0

    def gathered_states(self) -> float:
        """Of a linear layer whose rows are split over context: H K (K + V) for each of 2 chunks a device, those of all
        devices on each, in at least float32."""
        linear, net = self.model.linear_attention, self.model.gated_delta_net
        heads, keys, values = linear.num_heads, linear.key_width, linear.value_width
        if self.model.linear_attention_kind == "gated_delta_net":
            heads, keys, values = net.num_value_heads, net.key_width, net.value_width
        chunks = 2 * self.mesh.context if self.mesh.context > 1 else 0
        return self.rows * chunks * heads / self.mesh.tensor * keys * (keys + values) * self.wide

    def _selects(self) -> bool:
        indexer = self.model.full_attention.indexer
        is_sparse = self.model.full_attention_kind == "latent" and indexer.stage == "sparse"
        return is_sparse and self.config.data.row_tokens > indexer.top_k

    def _linear_attention(self) -> tuple[float, float]:
        """Kept, per token and head: q, k, v before and after their convolution, the decay's gate, the output's, mix. At
        most: besides what the kernels need, 11 times a head's width."""
        linear = self.model.linear_attention
        heads = linear.num_heads / self.mesh.tensor
        qkv = 2 * linear.key_width + linear.value_width
        kept = (2 * qkv + linear.key_width + 3 * linear.value_width) * self.compute
        kernels = _KERNEL_COPIES["kimi_delta"] * (linear.key_width + linear.value_width) / 2 * self.compute
        kept = self.tokens * heads * kept
        return kept, kept + self.tokens * heads * kernels + self.gathered_states()

    def _gated_delta_net(self) -> tuple[float, float]:
        """As for linear attention, with keys and queries repeated for each value head, and one decay a head; kernels
        need 13 times a head's width."""
        net = self.model.gated_delta_net
        heads, key_heads = net.num_value_heads / self.mesh.tensor, net.num_key_heads / self.mesh.tensor
        projected = 2 * (2 * key_heads * net.key_width + heads * net.value_width)
        kept = self.tokens * (projected + heads * (2 * net.key_width + 3 * net.value_width)) * self.compute
        kernels = _KERNEL_COPIES["gated_delta_net"] * (net.key_width + net.value_width) / 2 * self.compute
        return kept, kept + self.tokens * heads * kernels + self.gathered_states()

    def _full_attention(self) -> tuple[float, float]:
        """Kept, per token: latents, and for each head q, k, v, gate, mix. At most: the same twice, and four times the
        scores of one chunk of queries, in which XLA takes rows of many documents; of selected keys a chunk's gathered
        latents."""
        full = self.model.full_attention
        heads = full.num_heads / self.mesh.tensor
        latents = full.query_rank + 2 * (full.latent_width + full.shared_key_width)
        if self._selects():
            per_head = full.key_width + 2 * (full.latent_width + full.shared_key_width) + 2 * full.value_width
            keys: float = full.indexer.top_k
            gathered = keys * (full.latent_width + full.shared_key_width) * self.compute
        else:
            per_head, keys, gathered = 2 * full.key_width + 3 * full.value_width, self.config.data.row_tokens, 0.0
        chunk = self.rows * min(full.query_chunk_tokens, self.row_tokens)
        indexer = full.indexer
        index_scores = 0.0
        if indexer.stage != "none":
            index_scores = indexer.num_heads * self.config.data.row_tokens * self.wide
        # What keys and values are made of is held for whole rows.
        of_row = full.latent_width + full.shared_key_width
        if not self._selects():
            of_row += heads * (full.key_width + full.value_width)
        others = self.tokens * (self.mesh.context - 1) * of_row * self.compute
        kept = self.tokens * (latents + heads * per_head) * self.compute + others
        return kept, 2 * kept + chunk * (4 * heads * keys * self.wide + gathered + index_scores)

    def _grouped_attention_parts(self) -> tuple[float, float]:
        """(per token q and k before and after they turn, v, gate and mix, k and v of whole rows; scores of a chunk)."""
        grouped = self.model.grouped_attention
        heads, key_heads = grouped.num_heads / self.mesh.tensor, grouped.num_key_heads / self.mesh.tensor
        values = self.tokens * grouped.head_width * (4 * heads + 3 * key_heads) * self.compute
        values += self.tokens * (self.mesh.context - 1) * 2 * key_heads * grouped.head_width * self.compute
        chunk = self.rows * min(grouped.query_chunk_tokens, self.row_tokens)
        return values, chunk * heads * self.config.data.row_tokens * self.wide

    def _experts(self) -> tuple[float, float]:
        """(router, kernels and shared MLP, rows on their way) at the worst moment of the backward pass, with R of the
        experts' input width and I of their hidden values a row:

            router        three times the scores of all experts
            kernels       2 R + 6 I a row, 3 R more where rows are sorted
            shared MLP    its values and their gradients, as of a dense one
            on their way  5 R a row: sent, arrived, returned, and gradients; of a ring all rows and the sums of their
                          results, twice, with what each step keeps
        """
        moe, model = self.model.moe, self.model
        width = moe.latent_width or model.width
        devices, rows = num_expert_devices(self.config), self.exchanged_rows()
        sorted_copies = 3 * width if moe.expert_width > _WIDEST_FETCHED else 0
        kernels = rows * (2 * width + sorted_copies + 6 * moe.expert_width / self.mesh.tensor) * self.compute
        router = 3 * self.tokens * moe.num_experts * self.wide
        values = router + kernels + 2 * self._mlp(moe.shared_hidden_width)
        if devices == 1:
            return values, 0.0
        if moe.transport == "ring":
            passed = self.tokens * ((2 + devices) * self.compute + 2 * self.wide)
            return values, width * (2 * rows / devices * self.compute + passed)
        return values, 5 * rows * width * self.compute

    def _mlp(self, hidden_width: int) -> float:
        return 3 * self.tokens * hidden_width / self.mesh.tensor * self.compute
