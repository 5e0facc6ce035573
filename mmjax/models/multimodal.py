"""The whole model: images through the tower into the token embeddings, then the decoder; and its parameters by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.models.decoder import Decoder, LayerRecord
from mmjax.models.moe import RouterBias
from mmjax.models.vision import Projector, VisionTower

# Arrays of a model by dotted path, e.g. "decoder.segments.0.layers.1.mixer.query".
Arrays = dict[str, Any]


class MultimodalModel(nnx.Module):
    """Decoder whose image placeholders are replaced by projected features of the vision tower."""

    def __init__(self, model: ModelConfig):
        self.model = model
        self.decoder = Decoder(model)
        if model.vision.is_present:
            self.vision = VisionTower(model.vision, model.initializer_range, model.parameter_dtype)
            self.projector = Projector(model.vision, model.width, model.parameter_dtype)

    def __call__(
        self, batch: Batch, *, keep_hidden: bool = False
    ) -> tuple[jax.Array, tuple[tuple[LayerRecord, ...], ...]]:
        """This device's rows of a batch -> normed hidden values [b, s, d] and the layers' records."""
        embeddings = self.decoder.embed(batch.tokens)
        if self.model.vision.is_present:
            embeddings = place_features(embeddings, self.image_features(batch), batch.feature_index)
        return self.decoder(embeddings, batch.segment_ids, keep_hidden=keep_hidden)

    def image_features(self, batch: Batch) -> jax.Array:
        """Projected image features [b, P/4, d] of each row, in the compute dtype."""
        patches = batch.patches.astype(self.model.compute_dtype)
        return self.projector(
            self.vision(patches, batch.patch_segment_ids, batch.patch_position, batch.patch_grid, batch.patch_feature)
        )


def place_features(embeddings: jax.Array, features: jax.Array, feature_index: jax.Array) -> jax.Array:
    """`embeddings` [b, s, d] with `features` [b, f, d] in place of the tokens whose `feature_index` [b, s] is >= 0."""
    is_image = feature_index >= 0
    rows = jnp.take_along_axis(features, jnp.where(is_image, feature_index, 0)[..., None], axis=1)
    return jnp.where(is_image[..., None], rows, embeddings)


@dataclass(frozen=True)
class ModelDefinition:
    """A model without its numbers: what is needed to put arrays back into modules."""

    graph: Any
    parameters: dict[str, nnx.Variable]
    """Abstract variables of what is trained, with `array_axes`."""
    router_biases: dict[str, nnx.Variable]
    """Abstract variables that the router update moves, not the optimizer."""

    def assemble(self, parameters: Mapping[str, jax.Array], router_biases: Mapping[str, jax.Array]) -> MultimodalModel:
        """The model holding these arrays (tracers too)."""
        states = (_fill(self.parameters, parameters), _fill(self.router_biases, router_biases))
        return nnx.merge(self.graph, *states)


def define(model: ModelConfig) -> ModelDefinition:
    """The definition of `model`; no array is made, whatever its size."""
    graph, parameters, router_biases = nnx.split(MultimodalModel(model), nnx.Param, RouterBias)
    return ModelDefinition(graph, _by_path(parameters), _by_path(router_biases))


def _by_path(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _fill(variables: Mapping[str, nnx.Variable], arrays: Mapping[str, jax.Array]) -> nnx.State:
    if variables.keys() != arrays.keys():
        raise ValueError(f"arrays do not match the model: {sorted(variables.keys() ^ arrays.keys())}")
    return nnx.from_flat_state((_path_of(name), v.replace(arrays[name])) for name, v in variables.items())


def _path_of(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
