"""FLOPs of a step that trains parts of a model: backward as far as the first of them, and weights of those alone."""

from collections.abc import Collection

from mmjax.config import ModelConfig, layer_kinds
from mmjax.models.layout import layer_address
from mmjax.planner.cost import (
    WEIGHTLESS_PARTS,
    audio_forward_flops,
    forward_flops,
    residual_sources,
    training_flops,
    vision_forward_flops,
)
from mmjax.planner.parameters import ParameterArray, is_projection, parameter_arrays

_PARTS_OF_KIND = {
    "linear": ("linear attention projections", "linear attention recurrence"),
    "full": ("full attention projections", "full attention scores"),
    "moe": ("router", "latent projections", "routed experts", "shared experts"),
    "dense": ("dense MLP",),
}
_KIND_OF_PART = {
    "linear attention": "linear",
    "full attention": "full",
    "indexer": "full",
    "dense MLP": "dense",
    **dict.fromkeys(_PARTS_OF_KIND["moe"], "moe"),
}


def token_flops(model: ModelConfig, row_tokens: int, trained: Collection[str]) -> float:
    """Forward and backward of one text position in a document of `row_tokens`; arrays at the paths `trained` are
    trained.

        every product                                            1 x forward
        gradients by inputs, from the first block that holds
        something trained, or follows on it, to the loss         1 x more, 2 x for products of activations
        gradients by weights that are trained                    1 x more

    Blocks are the mixer and the MLP of each layer. An indexer reads detached inputs: as in `training_flops`.
    """
    forward, kinds = forward_flops(model, row_tokens), layer_kinds(model)
    first, num_blocks = _first_block(model, trained), 2 * model.num_layers
    inputs = forward["head"] if first <= num_blocks else 0.0
    for kind, parts in _PARTS_OF_KIND.items():
        blocks = [2 * layer + of_layer.index(kind) for layer, of_layer in enumerate(kinds) if kind in of_layer]
        share = sum(block >= first for block in blocks) / max(1, len(blocks))
        inputs += share * sum((2 if part in WEIGHTLESS_PARTS else 1) * forward[part] for part in parts)
    if model.residual == "attention":
        sources = list(residual_sources(model))
        inputs += 2 * forward["attention residuals"] * sum(sources[first:]) / sum(sources)
    inputs += 2 * forward["hyper connections"] * max(0, num_blocks - first) / num_blocks
    weights = forward["head"] if model.tied_head and "decoder.embedding" in trained else 0.0
    of_indexer = []
    for array in parameter_arrays(model):
        if not (array.in_decoder_layer or array.path == "decoder.head") or not _is_multiplied(array):
            continue
        size = array.layer_size * _num_trained(model, array, trained)
        if array.part == "indexer":
            of_indexer.append((size, array.size))
        elif array.part == "routed experts":
            weights += 2 * size * model.moe.experts_per_token / model.moe.num_resident_experts
        else:
            weights += 2 * size
    if of_indexer:
        size, whole = map(sum, zip(*of_indexer, strict=True))
        weights += (training_flops(model, row_tokens)["indexer"] - forward["indexer"]) * size / whole
    return sum(forward.values()) + inputs + weights


def patch_flops(model: ModelConfig, image_patches: int, trained: Collection[str]) -> float:
    """Forward and backward of one patch; a tower and its projector are trained whole or not at all."""
    projector = 2 * sum(array.size for array in _projector(model, is_audio=False)) / model.vision.patches_per_feature
    return _tower_flops(vision_forward_flops(model, image_patches), projector, trained, "vision", "projector")


def clip_flops(model: ModelConfig, trained: Collection[str]) -> float:
    """Forward and backward of one clip of sound, likewise."""
    projector = 2 * sum(array.size for array in _projector(model, is_audio=True)) * model.audio.clip_features
    return _tower_flops(audio_forward_flops(model), projector, trained, "audio", "audio_projector")


def _tower_flops(forward: float, projector: float, trained: Collection[str], tower_word: str, word: str) -> float:
    words = {path.split(".", 1)[0] for path in trained}
    is_tower, is_projector = tower_word in words, word in words
    if is_tower:
        return 3 * forward - (0 if is_projector else projector)
    return forward + (2 * projector if is_projector else 0)


def _projector(model: ModelConfig, *, is_audio: bool) -> list[ParameterArray]:
    return [
        array
        for array in parameter_arrays(model)
        if array.part == "projector" and array.path.startswith("audio") == is_audio and _is_multiplied(array)
    ]


def _is_multiplied(array: ParameterArray) -> bool:
    is_other = array.name in ("head", "router") or array.name.endswith("convolution")
    return is_projection(array.name, len(array.shape)) or is_other


def _first_block(model: ModelConfig, trained: Collection[str]) -> int:
    """Two for each layer; then what lies between the last one and the head, then the head's own product."""
    layers = {layer_address(model, layer)[:2]: layer for layer in reversed(range(model.num_layers))}

    def block(path: str) -> int:
        words = path.split(".")
        if words[:2] == ["decoder", "segments"]:
            return 2 * layers[int(words[2]), int(words[4])] + (words[5].startswith("ml"))
        if path == "decoder.head":
            return 2 * model.num_layers + 1
        return 2 * model.num_layers if words[1:2] in (["norm"], ["output_residual"]) and words[0] == "decoder" else 0

    return min((block(path) for path in trained if ".indexer." not in path), default=2 * model.num_layers + 2)


def _num_trained(model: ModelConfig, array: ParameterArray, trained: Collection[str]) -> int:
    """In how many places an array that is multiplied with is trained."""
    if not array.in_decoder_layer:
        return int(array.path in trained)
    kind = _KIND_OF_PART[array.part]
    addresses = (layer_address(model, layer) for layer, of_layer in enumerate(layer_kinds(model)) if kind in of_layer)
    paths = (f"decoder.segments.{one.segment}.layers.{one.position}.{array.path}" for one in addresses)
    return sum(path in trained for path in paths)
