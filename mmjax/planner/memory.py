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
# Values, gradients and temporaries for each intermediate value of a layer: set by compiled programs.
_COPIES = 3.0


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
    trained = [(shard.array, shard.rest_entries) for shard in held if shard.array.is_trained]
    return DeviceBytes(
        parameters=sum(shard.rest_bytes for shard in held),
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
    """Bytes of the layer (or table) whose gathered weights are the largest, in the compute dtype, and their gradients.

    What rests whole in the compute dtype is used where it rests. Gradients are there where trained, in the dtype at
    rest. The embedding table is gathered as it rests. Packed experts are gathered packed, and are there once more, in
    the order in which Hopper's kernels unpack them a tile at a time.
    """
    model = config.model
    compute = ITEM_BYTES[model.compute_dtype]
    layers: dict[str, float] = dict.fromkeys(("vision", "linear", "full", "moe", "dense", "all"), 0.0)
    largest_table = 0.0
    for shard in held:
        array = shard.array
        is_embedding = array.name == "embedding"
        item = ITEM_BYTES[array.dtype] if is_embedding else compute
        if shard.gather_factor == 1 and item == ITEM_BYTES[array.dtype]:
            item = 0
        item += ITEM_BYTES[array.dtype] if array.is_trained else 0
        if array.is_packed:
            item = (2 if shard.gather_factor > 1 else 1) * PACKED_BYTES
        used = shard.used_entries / shard.num_layers * item
        if array.part == "tables":
            largest_table = max(largest_table, used)
        elif array.part != "adapters":
            layers[_LAYER_OF[array.part]] += used
    decoder = [layers[mixer] + layers[mlp] + layers["all"] for mixer, mlp in kind_counts(model)]
    return max([largest_table, layers["vision"], *decoder])


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


def num_expert_devices(config: RunConfig) -> int:
    """How many devices routed experts are spread over."""
    return math.prod(config.mesh.sizes[axis] for axis in axes.MESH_AXES_OF_EXPERTS[config.model.moe.expert_axes])


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

    def saved_activations(self) -> float:
        """With remat: t D c a layer and residual stream, the same for each residual block, expert choices, and selected
        keys (all int32).

        Without: the working set of every layer. The tower always keeps its layers' inputs only. A pipeline keeps no
        more than the inputs of its stages for further micro-batches.
        """
        model, width = self.model, self.model.width
        share = self.stage_layers / model.num_layers
        num_blocks = -(-model.num_layers // model.residual_block_layers) if model.residual == "attention" else 0
        of_layers = model.num_layers * share * self.num_streams
        streams = (of_layers + num_blocks + 2) * self.tokens * width * self.compute
        decisions = 0.0
        for (mixer, mlp), number in self.kinds.items():
            if mlp == "moe":
                decisions += number * self.tokens * (model.moe.experts_per_token * _INT32 + self.wide)
            if mixer == "full" and self._selects():
                decisions += number * self.tokens * model.full_attention.indexer.top_k * _INT32
        layers = streams + decisions * share
        if model.remat == "none":
            layers += share * sum(number * self.layer_working_set(*kind) for kind, number in self.kinds.items())
        tower = model.vision.num_layers * self.patches * model.vision.width * self.compute
        vision = model.vision
        merged, per_feature = vision.width * vision.patches_per_feature, vision.patches_per_feature
        features = self.patches / per_feature * (2 * merged + width) * self.compute
        return layers + self.kept_inputs() + tower + features

    def kept_inputs(self) -> float:
        """Of a pipeline: inputs of stages that its schedule keeps, and 5 more that are on their way; with shared edges
        the embeddings of all micro-batches."""
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
        return (cost.num_inputs + 5) * message + (embedded if edges == "data_parallel" else 0.0)

    def largest_working_set(self) -> float:
        """The most that one layer, one chunk of the loss or one layer of the tower needs, with its gradients."""
        layers = [self.layer_working_set(mixer, mlp) for mixer, mlp in self.kinds]
        return max([*layers, self.loss_working_set(), self.tower_working_set()])

    def layer_working_set(self, mixer: str, mlp: str) -> float:
        """Intermediate values of one decoder layer, kept for its own backward pass, with their copies and gradients.

        Of grouped attention and a dense MLP what is there at one time: the MLP's values and gradients beside what the
        mixer keeps, then the mixer's with four copies of a chunk's scores. Of other layers three times all values.
        """
        residual = 4 * self.num_streams * self.tokens * self.model.width * self.compute
        if mixer == "full" and mlp == "dense" and self.model.full_attention_kind == "grouped":
            values, scores = self._grouped_attention_parts()
            return residual + max(values + 2 * self._mlp(self.model.moe.dense_width), 2 * values + 4 * scores)
        if mixer == "linear":
            is_kimi_delta = self.model.linear_attention_kind == "kimi_delta"
            values = self._linear_attention() if is_kimi_delta else self._gated_delta_net()
        elif self.model.full_attention_kind == "grouped":
            values = self._grouped_attention()
        else:
            values = self._full_attention()
        values += self._experts() if mlp == "moe" else self._mlp(self.model.moe.dense_width)
        return _COPIES * (values + residual)

    def exchange_buffers(self) -> float:
        """Rows sent and returned, 4 times a buffer of the experts' input width; of a ring, instead of what is sent, all
        rows twice and the sums of their results twice, at least float32, with what each step keeps for its gradient."""
        devices = num_expert_devices(self.config)
        if devices == 1 or not any(mlp == "moe" for _, mlp in self.kinds):
            return 0.0
        width = self.model.moe.latent_width or self.model.width
        if self.model.moe.transport == "ring":
            taken_out = 2 * self.exchanged_rows() / devices * self.compute
            return width * (taken_out + self.tokens * ((2 + devices) * self.compute + 2 * self.wide))
        return 4 * self.exchanged_rows() * width * self.compute

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

    def _linear_attention(self) -> float:
        """Per token and head: q, k, v before and after their convolution, decay, gate, mix; 3 C of a chunk's matrices;
        and K V / C of the chunk's state, all but the projections in at least float32."""
        linear = self.model.linear_attention
        heads = linear.num_heads / self.mesh.tensor
        qkv = 2 * linear.key_width + linear.value_width
        projected = (qkv + linear.key_width + linear.value_width) * self.compute
        mixed = (qkv + linear.key_width + 2 * linear.value_width) * self.wide
        chunk = (3 * linear.chunk_tokens + linear.key_width * linear.value_width / linear.chunk_tokens) * self.wide
        return self.tokens * heads * (projected + mixed + chunk) + self.gathered_states()

    def _gated_delta_net(self) -> float:
        """As for linear attention, with keys and queries repeated for each value head, and one decay a head."""
        net = self.model.gated_delta_net
        heads, key_heads = net.num_value_heads / self.mesh.tensor, net.num_key_heads / self.mesh.tensor
        projected = (2 * key_heads * net.key_width + 2 * heads * net.value_width) * self.compute
        mixed = heads * (2 * net.key_width + 3 * net.value_width) * self.wide
        chunk = heads * (3 * net.chunk_tokens + net.key_width * net.value_width / net.chunk_tokens) * self.wide
        return self.tokens * (projected + mixed + chunk) + self.gathered_states()

    def _full_attention(self) -> float:
        """Per token: latents, and for each head q, k, v, gate, mix; scores of one chunk of queries; of selected keys, a
        chunk's gathered latents."""
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
        return (
            self.tokens * (latents + heads * per_head) * self.compute
            + others
            + chunk * (2 * heads * keys * self.wide + gathered + index_scores)
        )

    def _grouped_attention(self) -> float:
        """What is kept, and scores of one chunk of queries and their gradient."""
        values, scores = self._grouped_attention_parts()
        return values + 2 * scores

    def _grouped_attention_parts(self) -> tuple[float, float]:
        """(per token q and k before and after they turn, v, gate and mix, k and v of whole rows; scores of a chunk)."""
        grouped = self.model.grouped_attention
        heads, key_heads = grouped.num_heads / self.mesh.tensor, grouped.num_key_heads / self.mesh.tensor
        values = self.tokens * grouped.head_width * (4 * heads + 3 * key_heads) * self.compute
        values += self.tokens * (self.mesh.context - 1) * 2 * key_heads * grouped.head_width * self.compute
        chunk = self.rows * min(grouped.query_chunk_tokens, self.row_tokens)
        return values, chunk * heads * self.config.data.row_tokens * self.wide

    def _experts(self) -> float:
        """Router scores; copies and outputs of t A rows; 3 hidden values a row; the shared MLP."""
        moe, model = self.model.moe, self.model
        width = moe.latent_width or model.width
        choices = self.tokens * moe.experts_per_token
        computed = self.exchanged_rows()
        routed = 2 * choices * width * self.compute + 3 * computed * moe.expert_width / self.mesh.tensor * self.compute
        router = 2 * self.tokens * moe.num_experts * self.wide
        return router + routed + self._mlp(moe.shared_hidden_width)

    def _mlp(self, hidden_width: int) -> float:
        return 3 * self.tokens * hidden_width / self.mesh.tensor * self.compute
