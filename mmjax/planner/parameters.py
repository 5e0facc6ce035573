"""Every array of a model, from its settings alone: shape, how it rests split, dtype, how often it occurs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mmjax import axes
from mmjax.config import MeshConfig, ModelConfig, layer_kinds
from mmjax.config.faults import MXFP4_GROUP, SPLIT_OVER
from mmjax.planner.towers import tower_arrays

Part = Literal[
    "tables",
    "norms and mixes",
    "linear attention",
    "full attention",
    "indexer",
    "router",
    "latent projections",
    "routed experts",
    "shared experts",
    "dense MLP",
    "vision",
    "audio",
    "projector",
    "adapters",
]

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
# Bytes an entry of MXFP4: half a byte of codes, and a scale of a byte for each group.
PACKED_BYTES = 1 / 2 + 1 / MXFP4_GROUP
# Arrays with several axes that Muon leaves to AdamW: tables and elementwise factors.
_NO_MATRICES = (
    "embedding",
    "head",
    "position_table",
    "sinusoids",
    *("decay_bias", "query_bias", "key_bias", "value_bias", "query_norm", "key_norm"),
    *("query_convolution", "key_convolution", "value_convolution"),
)


@dataclass(frozen=True, kw_only=True)
class ParameterArray:
    """One array, or `count` equal ones in as many layers."""

    path: str
    """Words below the layer, e.g. `mixer.query` or `mlp.shared.gate`; whole for arrays outside of layers."""
    part: Part
    shape: tuple[int, ...]
    array_axes: tuple[str | None, ...]
    dtype: str
    count: int = 1
    in_decoder_layer: bool = False
    """Decoder layers are what a pipeline cuts; everything else is on all of its stages."""
    is_trained: bool = True
    """False for what no gradient moves: correction biases, and all that adapters leave frozen."""
    is_packed: bool = False
    """Held as MXFP4: 4 bits an entry and 8 bits for each 32 entries."""
    adapted_part: Part | None = None
    """Of an adapter: the part of the matrix that it is put on."""

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def layer_size(self) -> int:
        """Entries of one layer, over all devices."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Entries over all layers and devices."""
        return self.count * self.layer_size

    @property
    def is_matrix(self) -> bool:
        """Whether Muon orthogonalises it."""
        return len(self.shape) > 1 and self.name not in _NO_MATRICES

    @property
    def num_input_axes(self) -> int:
        """How many axes, after that of the experts, a product with this matrix sums over."""
        return num_input_axes(self.name, len(self.shape))


def is_projection(name: str, num_axes: int) -> bool:
    """Whether an array of this name multiplies inputs in a plain product, as what adapters may stand around does."""
    # Releases hold the embedding of patches as a convolution, and what mixes streams (`projection`) as a parameter.
    is_other = name in (*_NO_MATRICES, "router", "patch_embedding", "projection")
    return num_axes > 1 and not is_other and not name.endswith(("norm", "bias", "convolution"))


def num_input_axes(name: str, num_axes: int) -> int:
    """How many of the axes of a projection, those that count experts left out, are its inputs'."""
    return num_axes - 1 if name == "output" else 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What the fullest device of a mesh has of an array."""

    array: ParameterArray
    num_layers: int
    """Of the layers that have it, how many the device has: decoder layers are dealt evenly to a pipeline's stages."""
    split_over: tuple[str, ...]
    """The mesh axes that one or other of its axes rests split over."""
    gathered_over: tuple[str, ...]
    """Those of them over which it is whole where it is used: fsdp and expert, for experts fsdp only."""
    rest_entries: int
    """Held at rest, over all these layers."""
    rest_bytes: float
    gather_factor: int
    """How many times larger it is where it is used."""

    @property
    def used_entries(self) -> int:
        """Gathered, over all these layers."""
        return self.rest_entries * self.gather_factor


def shards(arrays: Iterable[ParameterArray], mesh: MeshConfig, stages: Sequence[int] = ()) -> list[Shard]:
    """The shard of each array: its axes are split as the sharding table says.

    `stages`: layers of each pipeline stage, of which the fullest device counts, kinds of layers mixed alike; empty
    shares them out evenly.
    """
    fullest = max((sum(stages[device :: mesh.pipe]) for device in range(mesh.pipe)), default=0) if stages else 0
    share = fullest / sum(stages) if stages else 1 / mesh.pipe
    sizes, found = mesh.sizes, []

    def num_parts(mesh_axes: Iterable[str]) -> int:
        return math.prod(sizes[name] for name in mesh_axes)

    known: dict[tuple[tuple[str | None, ...], tuple[int, ...]], tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for array in arrays:
        count = math.ceil(round(array.count * share, 9)) if array.in_decoder_layer else array.count
        key = array.array_axes, array.shape
        if key not in known:
            known[key] = _split_of(array, array.shape, sizes)
        split_over, gathered_over = known[key]
        entries = count * array.layer_size // num_parts(split_over)
        if array.is_packed:
            # Codes of two inputs and scales of 32 are arrays of their own, which may rest split differently.
            experts, inputs, outputs = array.shape
            packed = [(experts, inputs // width, outputs) for width in (2, MXFP4_GROUP)]
            rest_bytes = sum(
                count * math.prod(shape) // num_parts(_split_of(array, shape, sizes)[0]) for shape in packed
            )
        else:
            rest_bytes = entries * ITEM_BYTES[array.dtype]
        found.append(
            Shard(
                array=array,
                num_layers=count,
                split_over=split_over,
                gathered_over=gathered_over,
                rest_entries=entries,
                rest_bytes=rest_bytes,
                gather_factor=num_parts(gathered_over),
            )
        )
    return found


def _split_of(
    array: ParameterArray, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(mesh axes that an array with the axes of `array` and this shape rests split over, those gathered at use)."""
    split_over: list[str] = []
    gathered_over: list[str] = []
    for axis, size in zip(array.array_axes, shape, strict=True):
        if axis:
            resting = axes.resting_axes(axis, SPLIT_OVER[axis], size, sizes)
            split_over += resting
            gathered_over += [name for name in axes.GATHERED_AT_USE.get(axis, ()) if name in resting]
    return tuple(split_over), tuple(gathered_over)


def wide(dtype: str) -> str:
    """At least float32."""
    return "float32" if dtype == "bfloat16" else dtype


def parameter_arrays(model: ModelConfig) -> list[ParameterArray]:
    """All arrays of `model`, correction biases of routers included (`is_trained` is False for those)."""
    kinds = layer_kinds(model)
    counts = {
        "linear": sum(mixer == "linear" for mixer, _ in kinds),
        "full": sum(mixer == "full" for mixer, _ in kinds),
        "dense": sum(mlp == "dense" for _, mlp in kinds),
        "moe": sum(mlp == "moe" for _, mlp in kinds),
    }
    dtype, width = model.parameter_dtype, model.width
    arrays: list[ParameterArray] = []

    def add(part: Part, path: str, shape: tuple[int, ...], array_axes: tuple[str | None, ...], **more) -> None:
        arrays.append(
            ParameterArray(path=path, part=part, shape=shape, array_axes=array_axes, **{"dtype": dtype, **more})
        )

    def add_layer(kind: str, part: Part, path: str, shape: tuple[int, ...], array_axes: tuple[str | None, ...], **more):
        count = len(kinds) if kind == "all" else counts[kind]
        if count:
            add(part, path, shape, array_axes, count=count, in_decoder_layer=True, **more)

    add("tables", "decoder.embedding", (model.vocabulary_size, width), ("vocabulary", "model_weight"))
    if not model.tied_head:
        add("tables", "decoder.head", (width, model.vocabulary_size), ("model_weight", "vocabulary"))
    is_layer_norm = model.norm == "layer"

    def norm_paths(path: str) -> tuple[str, ...]:
        """A LayerNorm has a bias."""
        is_norm = is_layer_norm and path.endswith("norm") and "residual" not in path
        return (f"{path}.scale", f"{path}.bias") if is_norm else (path,)

    for path in norm_paths("decoder.norm"):
        add("norms and mixes", path, (width,), (None,))
    layer_vectors = ["input_norm", "mlp_norm"]
    if model.residual == "attention":
        layer_vectors += [f"{mix}_residual.{name}" for mix in ("mixer", "mlp") for name in ("norm", "query")]
        for name in ("norm", "query"):
            add("norms and mixes", f"decoder.output_residual.{name}", (width,), (None,))
    if model.residual == "hyper":
        streams = model.hyper_connections.num_streams
        num_weights = (2 + streams) * streams
        for block in ("mixer_streams", "mlp_streams"):
            shape, axes_of_projection = (streams * width, num_weights), ("model_weight", None)
            add_layer("all", "norms and mixes", f"{block}.projection", shape, axes_of_projection)
            for name, size in (("base", num_weights), ("scale", 3)):
                add_layer("all", "norms and mixes", f"{block}.{name}", (size,), (None,), dtype=wide(dtype))
    for path in layer_vectors:
        for norm_path in norm_paths(path):
            add_layer("all", "norms and mixes", norm_path, (width,), (None,))
    is_gated_net = model.linear_attention_kind == "gated_delta_net"
    for path, shape, array_axes, is_wide in _gated_delta_net(model) if is_gated_net else _linear_attention(model):
        more = {"dtype": wide(dtype)} if is_wide else {}
        add_layer("linear", "linear attention", f"mixer.{path}", shape, array_axes, **more)
    is_grouped = model.full_attention_kind == "grouped"
    for path, shape, array_axes in _grouped_attention(model) if is_grouped else _full_attention(model):
        part: Part = "indexer" if path.startswith("indexer.") else "full attention"
        for norm_path in norm_paths(path) if is_grouped else (path,):
            add_layer("full", part, f"mixer.{norm_path}", shape, array_axes)
    into_names = ("gate", "up") if model.dense_mlp == "gated" else ("up",)
    for path, shape, array_axes in _mlp(width, model.moe.dense_width, into_names, has_bias=model.mlp_bias):
        add_layer("dense", "dense MLP", f"mlp.{path}", shape, array_axes)
    moe = model.moe
    router_dtype = wide(dtype)
    router_shape = (width, moe.num_experts)
    add_layer("moe", "router", "mlp.router", router_shape, ("model_weight", None), dtype=router_dtype)
    if moe.router.correction_bias:
        add_layer("moe", "router", "mlp.bias", (moe.num_experts,), (None,), dtype=router_dtype, is_trained=False)
    expert_input = moe.latent_width or width
    if moe.latent_width:
        add_layer("moe", "latent projections", "mlp.latent_down", (width, expert_input), ("model_weight", None))
        add_layer("moe", "latent projections", "mlp.latent_up", (expert_input, width), (None, "model_weight"))
        if moe.latent_norm:
            add_layer("moe", "norms and mixes", "mlp.latent_norm", (expert_input,), (None,))
    experts = axes.ARRAY_AXIS_OF_EXPERTS[moe.expert_axes]
    into = (moe.num_resident_experts, expert_input, moe.expert_width)
    for path in ("gate", "up"):
        add_layer("moe", "routed experts", f"mlp.{path}", into, (experts, None, "expert_hidden"))
    out = (moe.num_resident_experts, moe.expert_width, expert_input)
    add_layer("moe", "routed experts", "mlp.down", out, (experts, "expert_hidden", None))
    if moe.num_shared_experts:
        for path, shape, array_axes in _mlp(width, moe.shared_hidden_width):
            add_layer("moe", "shared experts", f"mlp.shared.{path}", shape, array_axes)
        if moe.shared_gate == "sigmoid":
            add_layer("moe", "shared experts", "mlp.shared_gate", (width, 1), ("model_weight", None))
    for part, path, shape, array_axes, count in tower_arrays(model):
        add(part, path, shape, array_axes, count=count)
    return arrays


def num_parameters(model: ModelConfig) -> int:
    """Parameters as releases count them, correction biases included."""
    return sum(array.size for array in parameter_arrays(model))


def num_active_parameters(model: ModelConfig) -> int:
    """What a text token is multiplied with: no expert that it does not visit, no table that is only looked up in, no
    vision."""
    moe = model.moe
    return sum(
        array.size * moe.experts_per_token // moe.num_resident_experts if array.part == "routed experts" else array.size
        for array in parameter_arrays(model)
        if array.part not in ("vision", "audio", "projector")
        and (array.name != "embedding" or model.tied_head)
        and array.is_trained
    )


def _linear_attention(
    model: ModelConfig,
) -> Iterator[tuple[str, tuple[int, ...], tuple[str | None, ...], bool]]:
    linear, width = model.linear_attention, model.width
    heads, keys, values = linear.num_heads, linear.key_width, linear.value_width
    for name, head_width in (("query", keys), ("key", keys), ("value", values)):
        yield name, (width, heads, head_width), ("model_weight", "heads", None), False
        yield f"{name}_convolution", (linear.convolution_width, heads, head_width), (None, "heads", None), False
    yield "decay_down", (width, linear.decay_rank), ("model_weight", None), False
    yield "decay_up", (linear.decay_rank, heads, keys), (None, "heads", None), False
    yield "log_rate", (heads,), ("heads",), True
    yield "decay_bias", (heads, keys), ("heads", None), True
    yield "beta", (width, heads), ("model_weight", "heads"), False
    if linear.output_gate == "full":
        yield "output_gate", (width, heads, values), ("model_weight", "heads", None), False
    else:
        yield "output_gate_down", (width, linear.output_gate_rank), ("model_weight", None), False
        yield "output_gate_up", (linear.output_gate_rank, heads, values), (None, "heads", None), False
    yield "output_norm", (values,), (None,), True
    yield "output", (heads, values, width), ("heads", None, "model_weight"), False


def _gated_delta_net(
    model: ModelConfig,
) -> Iterator[tuple[str, tuple[int, ...], tuple[str | None, ...], bool]]:
    net, width = model.gated_delta_net, model.width
    keys, values = (net.num_key_heads, net.key_width), (net.num_value_heads, net.value_width)
    for name, heads in (("query", keys), ("key", keys), ("value", values)):
        yield name, (width, *heads), ("model_weight", "heads", None), False
        yield f"{name}_convolution", (net.convolution_width, *heads), (None, "heads", None), False
    for name in ("decay", "beta"):
        yield name, (width, values[0]), ("model_weight", "heads"), False
    for name in ("log_rate", "decay_bias"):
        yield name, (values[0],), ("heads",), True
    yield "output_gate", (width, *values), ("model_weight", "heads", None), False
    yield "output_norm", (values[1],), (None,), True
    yield "output", (*values, width), ("heads", None, "model_weight"), False


def _full_attention(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], tuple[str | None, ...]]]:
    full, indexer, width = model.full_attention, model.full_attention.indexer, model.width
    heads, latent = full.num_heads, full.latent_width
    if full.query_rank:
        yield "query_down", (width, full.query_rank), ("model_weight", None)
        yield "query_norm", (full.query_rank,), (None,)
        yield "query_up", (full.query_rank, heads, full.key_width), ("rank_weight", "heads", None)
    else:
        yield "query", (width, heads, full.key_width), ("model_weight", "heads", None)
    yield "latent_down", (width, latent + full.shared_key_width), ("model_weight", None)
    yield "latent_norm", (latent,), (None,)
    yield "key_up", (latent, heads, full.nope_width), ("rank_weight", "heads", None)
    yield "value_up", (latent, heads, full.value_width), ("rank_weight", "heads", None)
    if full.output_gate == "sigmoid":
        yield "output_gate", (width, heads, full.value_width), ("model_weight", "heads", None)
    yield "output", (heads, full.value_width, width), ("heads", None, "model_weight")
    if indexer.stage != "none":
        input_width, input_axis = (full.query_rank, "rank_weight") if full.query_rank else (width, "model_weight")
        yield "indexer.query_up", (input_width, indexer.num_heads, indexer.head_width), (input_axis, None, None)
        yield "indexer.key", (width, indexer.head_width), ("model_weight", None)
        yield "indexer.key_norm_scale", (indexer.head_width,), (None,)
        if indexer.key_norm_bias:
            yield "indexer.key_norm_bias", (indexer.head_width,), (None,)
        yield "indexer.head_weight", (width, indexer.num_heads), ("model_weight", None)


def _grouped_attention(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], tuple[str | None, ...]]]:
    grouped, width = model.grouped_attention, model.width
    heads, key_heads, head_width = grouped.num_heads, grouped.num_key_heads, grouped.head_width
    for name, number in (("query", heads), ("key", key_heads), ("value", key_heads)):
        yield name, (width, number, head_width), ("model_weight", "heads", None)
        if grouped.projection_bias:
            yield f"{name}_bias", (number, head_width), ("heads", None)
    if grouped.head_norm:
        yield "query_norm", (head_width,), (None,)
        yield "key_norm", (head_width,), (None,)
    if grouped.joint_norm:
        yield "query_norm", (heads, head_width), ("heads", None)
        yield "key_norm", (key_heads, head_width), ("heads", None)
    if grouped.output_gate == "sigmoid":
        yield "output_gate", (width, heads, head_width), ("model_weight", "heads", None)
    yield "output", (heads, head_width, width), ("heads", None, "model_weight")
    if grouped.output_bias:
        yield "output_bias", (width,), (None,)


def _mlp(
    width: int, hidden_width: int, into: tuple[str, ...] = ("gate", "up"), *, has_bias: bool = False
) -> Iterator[tuple[str, tuple[int, ...], tuple[str | None, ...]]]:
    for name in into:
        yield name, (width, hidden_width), ("model_weight", "hidden")
        if has_bias:
            yield f"{name}_bias", (hidden_width,), ("hidden",)
    yield "down", (hidden_width, width), ("hidden", "model_weight")
    if has_bias:
        yield "down_bias", (width,), (None,)
