"""The whole model: images through the tower into the token embeddings, then the decoder; and its parameters by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.errors import ConfigurationError
from mmjax.models.audio import AudioProjector, AudioTower, hear
from mmjax.models.cache import DecoderCache
from mmjax.models.decoder import Decoder, LayerRecord
from mmjax.models.moe import RouterBias
from mmjax.models.qwen_vision import token_positions
from mmjax.models.towers import VisualFeatures, make_projector, make_tower, read_pictures
from mmjax.parallel import context

# Arrays of a model by dotted path, e.g. "decoder.segments.0.layers.1.mixer.query".
Arrays = dict[str, Any]


class MultimodalModel(nnx.Module):
    """Decoder whose placeholders of pictures and sounds are replaced by projected features of their towers."""

    def __init__(self, model: ModelConfig):
        self.model = model
        self.decoder = Decoder(model)
        if model.vision.is_present:
            self.vision = make_tower(model)
            self.projector = make_projector(model)
        if model.audio.is_present:
            self.audio = AudioTower(model.audio, model.initializer_range, model.parameter_dtype)
            options = (model.width, model.initializer_range, model.parameter_dtype)
            self.audio_projector = AudioProjector(model.audio, *options)

    def __call__(
        self,
        batch: Batch,
        *,
        cache: DecoderCache | None = None,
        keep_hidden: bool = False,
    ) -> tuple[jax.Array, tuple[tuple[LayerRecord, ...], ...]]:
        """This device's rows of a batch -> normed hidden values [b, s, d] and the layers' records.

        With a `cache` each row is one document that goes on behind what it holds (see `Decoder`).
        """
        embeddings = self.decoder.embed(batch.tokens)
        return self.from_embeddings(embeddings, batch, cache=cache, keep_hidden=keep_hidden)

    def from_embeddings(
        self,
        embeddings: jax.Array,
        batch: Batch,
        *,
        cache: DecoderCache | None = None,
        keep_hidden: bool = False,
    ) -> tuple[jax.Array, tuple[tuple[LayerRecord, ...], ...]]:
        """The same from embeddings [b, s, d] of `batch.tokens`."""
        embeddings, additions = self.with_features(embeddings, batch)
        return self.decoder(
            embeddings,
            batch.segment_ids,
            self.positions(batch),
            additions=additions,
            cache=cache,
            keep_hidden=keep_hidden,
        )

    def with_features(self, embeddings: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
        """Embeddings [b, s, d] with features of pictures and sounds, and what is added to layers' outputs, if any."""
        additions = None
        if self.model.vision.is_present and batch.patches.shape[1]:
            pictures = self.picture_features(batch)
            embeddings = place_features(embeddings, pictures.features, batch.feature_index)
            if pictures.deep is not None:
                nothing = jnp.zeros_like(embeddings)
                additions = jax.vmap(lambda deep: place_features(nothing, deep, batch.feature_index))(pictures.deep)
        if self.model.audio.is_present and batch.spectrograms.shape[1]:
            embeddings = place_features(embeddings, self.sound_features(batch), batch.sound_index)
        return embeddings, additions

    def positions(self, batch: Batch) -> jax.Array:
        """What rotation turns tokens by: [b, s], or [3, b, s] (frame, row and column) if there are pictures."""
        has_pictures = self.model.vision.is_present and batch.patches.shape[1]
        if not (has_pictures and self.model.grouped_attention.rotary.sections):
            return batch.positions
        # They count along whole rows.
        feature_index, positions = context.gather_positions(batch.feature_index, batch.positions)
        whole = token_positions(batch._replace(feature_index=feature_index, positions=positions))
        return context.own_positions(whole, axis=2)

    def sound_features(self, batch: Batch) -> jax.Array:
        """Projected features [b, F, d] of each row's sounds, in the compute dtype."""
        spectrograms = batch.spectrograms.astype(self.model.compute_dtype)
        return hear(self.audio, self.audio_projector, spectrograms, batch.sound_index)

    def picture_features(self, batch: Batch) -> VisualFeatures:
        """Projected features of each row's pictures (see `read_pictures`)."""
        patches = batch.patches.astype(self.model.compute_dtype)
        return read_pictures(self.vision, self.projector, patches, batch)


def place_features(embeddings: jax.Array, features: jax.Array, feature_index: jax.Array) -> jax.Array:
    """`embeddings` [b, s, d] with `features` [b, f, d] in place of the tokens whose `feature_index` [b, s] is >= 0."""
    is_feature = feature_index >= 0
    # Beside the features, not at one of them: gradients of all other tokens would wait for each other there.
    place = jnp.where(is_feature, feature_index, features.shape[1])
    rows = jnp.take_along_axis(features, place[..., None], axis=1, mode="fill", fill_value=0)
    return jnp.where(is_feature[..., None], rows.astype(embeddings.dtype), embeddings)


@dataclass(frozen=True)
class ModelDefinition:
    """A model without its numbers: what is needed to put arrays back into modules."""

    graph: Any
    parameters: dict[str, nnx.Variable]
    """Abstract variables of what is trained, with `array_axes`."""
    router_biases: dict[str, nnx.Variable]
    """Abstract variables that the router update moves, not the optimizer."""
    frozen: dict[str, nnx.Variable]
    """Abstract variables that nothing moves: packed experts, and under adapters the whole model."""
    adapted: frozenset[str] = frozenset()
    """Paths of the frozen weights that an adapter stands around."""

    def assemble(
        self,
        parameters: Mapping[str, jax.Array],
        router_biases: Mapping[str, jax.Array],
        frozen: Mapping[str, jax.Array] | None = None,
    ) -> MultimodalModel:
        """The model holding these arrays (tracers too)."""
        groups = ((self.parameters, parameters), (self.router_biases, router_biases), (self.frozen, frozen or {}))
        return nnx.merge(self.graph, *(self._fill(*group) for group in groups))

    def _fill(self, variables: Mapping[str, nnx.Variable], arrays: Mapping[str, jax.Array]) -> nnx.State:
        if variables.keys() != arrays.keys():
            raise ValueError(f"arrays do not match the model: {sorted(variables.keys() ^ arrays.keys())}")
        # Layers know by this mark which of their variables have gradients.
        is_trained = variables is self.parameters
        return nnx.from_flat_state(
            (
                (*path_of(name), *([_BASE] if name in self.adapted else [])),
                v.replace(arrays[name], is_trained=is_trained),
            )
            for name, v in variables.items()
        )


# Where `LoraWeight` holds the weight that it adapts; no part of a path, which is the same with and without adapters.
_BASE = "lora_base"


def define(model: ModelConfig, trained: tuple[str, ...] = ()) -> ModelDefinition:
    """The definition of `model`; no array is made, whatever its size.

    `trained` names parts by the first words of their paths; all others are frozen. Empty trains all.

    Raises:
      ConfigurationError: a name is that of no part.
    """
    module = MultimodalModel(model)
    if not trained:
        return definition_of(module, nnx.Param)
    module.decoder.is_head_trained = begins("decoder.embedding" if model.tied_head else "decoder.head", trained)
    definition = definition_of(
        module, lambda path, variable: isinstance(variable, nnx.Param) and begins(_name_of(path), trained)
    )
    for name in trained:
        if not any(begins(path, (name,)) for path in definition.parameters):
            raise ConfigurationError(
                "trained",
                found=f"{name!r}, with which no path begins that can be trained",
                expected="first words of paths",
                remedy=f"give some of: {', '.join(_parts(definition))}",
            )
    return definition


def begins(path: str, names: Iterable[str]) -> bool:
    """Whether the first words of a path are one of `names`, or words anywhere in it those behind a name's `*.`."""
    return any(
        f".{name[2:]}." in f".{path}." if name.startswith("*.") else path == name or path.startswith(f"{name}.")
        for name in names
    )


def _parts(definition: ModelDefinition) -> list[str]:
    """First words of paths; of the decoder's the first two."""
    words = (path.split(".") for path in definition.parameters | definition.frozen)
    return sorted({".".join(path[: 2 if path[0] == "decoder" else 1]) for path in words} | {"decoder"})


def definition_of(module: MultimodalModel, trained: Any) -> ModelDefinition:
    """The definition of a described model whose variables that `trained`, a filter of nnx, takes are trained."""
    graph, *states = nnx.split(module, trained, RouterBias, ...)
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    parameters, router_biases, frozen = cast("list[dict[tuple[str | int, ...], nnx.Variable]]", flat)
    adapted = {path[:-1] for path in frozen if path[-1] == _BASE}
    frozen = {path[:-1] if path[-1] == _BASE else path: variable for path, variable in frozen.items()}
    return ModelDefinition(
        graph,
        _by_name(parameters),
        _by_name(router_biases),
        _by_name(frozen),
        frozenset(_name_of(path) for path in adapted),
    )


def _by_name(variables: Mapping[tuple, nnx.Variable]) -> dict[str, nnx.Variable]:
    return {_name_of(path): variable for path, variable in variables.items()}


def _name_of(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def path_of(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
