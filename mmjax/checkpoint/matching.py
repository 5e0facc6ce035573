"""Which stored tensors hold which expected ones, and that nothing is missing, left over or filled twice."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmjax.axes import holds_experts
from mmjax.checkpoint.codecs import CODECS, MXFP4, Codec, codec_of
from mmjax.checkpoint.manifest import listed
from mmjax.checkpoint.released_config import read_family
from mmjax.checkpoint.safetensors_files import StoredTensor
from mmjax.config import ModelConfig
from mmjax.errors import CheckpointError
from mmjax.models.families import Family
from mmjax.models.families.released import LINEAR, ReleasedTensor, Slot
from mmjax.models.multimodal import define

EMBEDDING, HEAD = "decoder.embedding", "decoder.head"
# Numbers that follow from the configuration; some checkpoints hold them all the same. They are kept as they are.
_BUFFERS = (".rotary_emb.inv_freq", ".embeddings.position_ids")
# Expected tensors are counted up to this multiple of the stored ones.
_MOST_EXPECTED = 10


class Match(NamedTuple):
    """An expected tensor and the stored ones that hold it."""

    expected: ReleasedTensor
    sources: dict[str, str]
    """Names of the stored tensors, by suffix of the codec; plain numbers have the suffix ""."""
    codec: Codec | None
    is_kept: bool = False
    """Its codes stay packed."""


class Target(NamedTuple):
    """One of our arrays."""

    shape: tuple[int, ...]
    num_stacked: int
    """Leading axes along which its slots are stacked."""


@dataclass(frozen=True)
class Matching:
    """How a released checkpoint and a model hold the same numbers."""

    model: ModelConfig
    """With packed experts if they stay packed."""
    matches: tuple[Match, ...]
    targets: dict[str, Target]
    """Every array of the model."""
    head_copy: tuple[str, str] | None
    """Names of a stored head that must be a copy, since the configuration ties it, and of the embedding."""
    buffers: tuple[str, ...]
    """Stored tensors that are kept beside the arrays."""


def match(place: str, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], *, keeps_packed: bool) -> Matching:
    """Match the stored tensors of a released checkpoint with those that its config.json promises.

    Raises:
      ConfigurationError: its family, or a field of its config.json, is not understood.
      CheckpointError: tensors are missing, left over, of another shape or packed otherwise; all are listed.
    """
    codec = codec_of(config)
    family, model = read_family(config)
    if model.num_layers > len(stored):
        raise CheckpointError(
            place,
            found=f"{len(stored)} tensors for {model.num_layers} layers",
            expected="several tensors a layer",
            remedy="take the config.json and the weights from one release",
        )
    # More tensors than could be there need not be named.
    expected = list(itertools.islice(family.released_tensors(model), _MOST_EXPECTED * len(stored) + 1000))
    canonical = getattr(family, "canonical_name", lambda name: name)
    # Of two names for one tensor, the second is left over.
    names: dict[str, str] = {}
    for name in stored:
        names.setdefault(canonical(name), name)
    faults: list[str] = []
    matches = [_find(tensor, names, stored, codec, faults) for tensor in expected]
    found = [one for one in matches if one is not None]
    used = {name for one in found for name in one.sources.values()}
    head_copy = _head_copy(model, family, names, expected)
    left = [name for name in stored if name not in used and (head_copy is None or name != head_copy[0])]
    is_left_out = getattr(family, "is_left_out", lambda model, name: False)
    buffers = tuple(name for name in left if name.endswith(_BUFFERS) or is_left_out(model, canonical(name)))
    left = [name for name in left if name not in buffers]
    if len(found) < len(expected) or left or faults:
        _refuse(place, model, [t for t, one in zip(expected, matches, strict=True) if one is None], left, faults)
    shapes, experts = _shapes(model)
    kept = _kept(found, experts) if keeps_packed else set()
    if kept:
        found = [
            one._replace(is_kept=True) if one.codec is MXFP4 and one.expected.slots[0].path in kept else one
            for one in found
        ]
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, expert_storage="mxfp4"))
    return Matching(model, tuple(found), _targets(place, shapes, found), head_copy, buffers)


def packed_slots(one: Match) -> tuple[Slot, Slot]:
    """Where the codes and the scales of a match that stays packed go."""
    (slot,) = one.expected.slots
    return Slot(f"{slot.path}_codes", slot.index), Slot(f"{slot.path}_scales", slot.index)


def packed_shapes(one: Match) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the codes and the scales of a match that stays packed."""
    rows, columns = one.expected.shape
    return (rows, columns // 2), (rows, columns // 32)


def _find(
    expected: ReleasedTensor,
    names: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    codec: Codec | None,
    faults: list[str],
) -> Match | None:
    """The stored tensors of an expected one; what is wrong with them is added to `faults`.

    `names` has the stored name of each canonical one.
    """
    stem = expected.name.removesuffix(".weight")
    for packing in CODECS.values() if stem != expected.name else ():
        sources = {suffix: names.get(f"{stem}.{suffix}", "") for suffix in packing.suffixes}
        # INT4 has all that MXFP4 has, and one tensor more.
        if not all(sources.values()) or (packing is MXFP4 and f"{stem}.weight_shape" in names):
            continue
        if packing is not codec:
            said = f"config.json speaks of {codec.name}" if codec else "config.json has no quantization_config"
            faults.append(f"{stem} is packed as {packing.name}; {said}")
        for suffix, source in sources.items():
            if (dtype := stored[source].dtype) not in packing.dtypes[suffix]:
                faults.append(f"{source} has dtype {dtype}, expected {' or '.join(map(str, packing.dtypes[suffix]))}")
        try:
            shape = packing.logical_shape({suffix: stored[source].shape for suffix, source in sources.items()})
        except ValueError as error:
            faults.append(f"{stem}: {error}")
        else:
            if shape != expected.shape:
                faults.append(f"{stem} holds numbers of shape {list(shape)}, expected {list(expected.shape)}")
        return Match(expected, sources, packing)
    if (name := names.get(expected.name)) is None:
        return None
    tensor = stored[name]
    if not expected.accepts(tensor.shape):
        faults.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected.shape)}")
    if tensor.dtype.kind not in "fV" or tensor.dtype.itemsize == 1:
        faults.append(f"{name} has dtype {tensor.dtype} and no scales, expected floating-point numbers")
    return Match(expected, {"": name}, None)


def _head_copy(
    model: ModelConfig, family: Family, names: Mapping[str, str], expected: Iterable[ReleasedTensor]
) -> tuple[str, str] | None:
    """The stored head of a model whose configuration ties it to the embedding."""
    if not model.tied_head:
        return None
    untied = family.released_tensors(dataclasses.replace(model, tied_head=False))
    heads = [tensor.name for tensor in untied if any(slot.path == HEAD for slot in tensor.slots)]
    embedding = next(tensor.name for tensor in expected if any(slot.path == EMBEDDING for slot in tensor.slots))
    head = next((names[name] for name in heads if name in names), None)
    return None if head is None or embedding not in names else (head, names[embedding])


def _shapes(model: ModelConfig) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of all arrays of a model, and which hold routed experts."""
    definition = define(dataclasses.replace(model, moe=dataclasses.replace(model.moe, expert_storage="dense")))
    variables = definition.parameters | definition.router_biases | definition.frozen
    shapes = {path: variable.get_value().shape for path, variable in variables.items()}
    experts = {path for path, variable in variables.items() if holds_experts(variable.get_metadata()["array_axes"])}
    return shapes, experts


def _kept(matches: Iterable[Match], experts: set[str]) -> set[str]:
    """Arrays of routed experts that can stay packed: all of them, or none."""
    packed: dict[str, bool] = {}
    for one in matches:
        for slot in one.expected.slots:
            if slot.path in experts:
                can_stay = one.codec is MXFP4 and one.expected.layout is LINEAR and len(one.expected.slots) == 1
                packed[slot.path] = packed.get(slot.path, True) and can_stay
    return set(packed) if packed and all(packed.values()) else set()


def _targets(place: str, shapes: Mapping[str, tuple[int, ...]], matches: Iterable[Match]) -> dict[str, Target]:
    """Every array, filled by its slots exactly once."""
    indices: dict[str, list[tuple[int, ...]]] = {path: [] for path in shapes}
    packed: dict[str, Match] = {}
    faults = []
    for one in matches:
        for slot in one.expected.slots:
            if slot.path in indices:
                indices[slot.path].append(slot.index)
            else:
                faults.append(f"{one.expected.name} fills {slot.path}, which the model has not")
        if one.is_kept:
            packed[one.expected.slots[0].path] = one
    targets = {}
    for path, shape in shapes.items():
        depths = {len(index) for index in indices[path]}
        depth = depths.pop() if len(depths) == 1 else 0
        filled, needed = len(indices[path]), math.prod(shape[:depth])
        if filled != needed or len(set(indices[path])) != needed:
            faults.append(f"{path} has {needed} parts, of which {len(set(indices[path]))} are filled, {filled} times")
        elif path in packed:
            for slot, part in zip(packed_slots(packed[path]), packed_shapes(packed[path]), strict=True):
                targets[slot.path] = Target((*shape[:depth], *part), depth)
        else:
            targets[path] = Target(shape, depth)
    if faults:
        raise CheckpointError(
            place,
            found=listed(faults, "; "),
            expected="each array of the model filled exactly once",
            remedy="this is a fault of the family's module in mmjax/models/families",
        )
    return targets


def _refuse(place: str, model: ModelConfig, missing: list[ReleasedTensor], left: list[str], faults: list[str]) -> None:
    """All that does not fit, in one error."""
    texts = []
    if missing:
        texts.append(f"{len(missing)} tensors missing: {listed([tensor.name for tensor in missing])}")
    if left:
        texts.append(f"{len(left)} tensors not understood: {listed(left)}")
    if faults:
        texts.append(listed(faults, "; "))
    remedy = "take the config.json and the weights from one release"
    if not model.tied_head and [slot.path for tensor in missing for slot in tensor.slots] == [HEAD]:
        remedy = "if the head is the embedding, set tie_word_embeddings to true in config.json; else the head is lost"
    raise CheckpointError(
        place, found="; ".join(texts), expected="exactly the tensors that config.json promises", remedy=remedy
    )
