"""LoRA around any model: which projections get adapters, the adapted model's definition, and merging."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.axes import holds_experts
from mmjax.config import LoraConfig, ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families.released import ReleasedTensor
from mmjax.models.layers import LoraFactor, LoraWeight, at_least_float32
from mmjax.models.multimodal import Arrays, ModelDefinition, MultimodalModel, define, definition_of, path_of
from mmjax.planner.parameters import is_projection, num_input_axes
from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize

ALL_LINEAR = "all-linear"
DOWN, UP = "down", "up"


@dataclass(frozen=True)
class Projection:
    """A weight that can take an adapter, or a stack of them: one for each repeat of a layer pattern."""

    path: str
    """Of the weight in its unpacked form, as in `multimodal.Arrays`."""
    shape: tuple[int, ...]
    """[repeats, experts, in..., out...], the first two where it has them."""
    array_axes: tuple[str | None, ...]
    """Of one layer's weight: no word for the repeats."""
    is_packed: bool
    stack_axis: str | None = None
    """Name of the axis of the repeats, where it is split."""

    @property
    def num_stacked(self) -> int:
        return len(self.shape) - len(self.array_axes)

    @property
    def num_experts(self) -> int:
        """0 for anything but routed experts."""
        return self.shape[self.num_stacked] if holds_experts(self.array_axes) else 0

    @property
    def num_leading(self) -> int:
        """Axes before those of the inputs."""
        return self.num_stacked + bool(self.num_experts)

    @property
    def num_inputs(self) -> int:
        return num_input_axes(self.path.rsplit(".", 1)[-1], len(self.shape) - self.num_leading)


def projections(model: ModelConfig) -> dict[str, Projection]:
    """Every weight of `model` that can take an adapter, by path: no table, no head, no router, nothing elementwise."""
    definition, found = define(model), {}
    for path, variable in (definition.parameters | definition.frozen).items():
        shape, metadata = variable.get_value().shape, variable.get_metadata()
        array_axes, stack_axis = metadata["array_axes"], metadata.get("stack_axis")
        is_packed = path.endswith("_codes")
        if is_packed:
            path = path.removesuffix("_codes")
            shape = (*shape[:-2], 2 * shape[-1], shape[-2])
            array_axes = (array_axes[0], array_axes[2], array_axes[1])
        is_able = is_projection(path.rsplit(".", 1)[-1], len(array_axes))
        if is_able and not path.endswith("_scales"):
            found[path] = Projection(path, shape, array_axes, is_packed, stack_axis)
    return found


def match(model: ModelConfig, lora: LoraConfig, released: Iterable[ReleasedTensor] = ()) -> tuple[Projection, ...]:
    """The projections that `lora` adapts, in the order of the model. `released`: the tensors whose names may be given.

    Raises:
      ConfigurationError: a pattern matches nothing, or only what takes no adapter, or some of the layers that are held
        as one stack; or nothing is left.
    """
    able = projections(model)
    if lora.experts == "none":
        able = {path: projection for path, projection in able.items() if not projection.num_experts}
    names: dict[str, list[str]] = {path: [] for path in able}
    others = []
    for tensor in released:
        name = tensor.name.removesuffix(".weight")
        paths = [slot.path for slot in tensor.slots if slot.path in able]
        for path in paths:
            names[path].append(name)
        if not paths:
            others.append(name)

    def select(setting: str, patterns: Sequence[str]) -> dict[str, set[str]]:
        """Path -> the released names of it that are matched; our own name stands for all of them."""
        chosen: dict[str, set[str]] = {path: set() for path in able}
        for pattern in patterns:
            fits = _matcher(pattern, setting)
            hits = {path: {n for n in names[path] if pattern == ALL_LINEAR or fits(n)} for path in able}
            refused = [name for name in others if fits(name)]
            if not any(hits.values()) and not refused:
                hits = {p: {p, *names[p]} if pattern == ALL_LINEAR or fits(p) else set() for p in able}
            if not any(hits.values()):
                raise _no_match(setting, pattern, refused, names)
            for path, hit in hits.items():
                chosen[path] |= hit
        return chosen

    wanted, excluded = select("lora.targets", lora.targets), select("lora.exclude", lora.exclude)
    matched = []
    for path, projection in able.items():
        left = wanted[path] - excluded[path]
        missing = sorted(set(names[path]) - left) if left - {path} else []
        if path in excluded[path]:
            left = set()
        elif missing:
            raise ConfigurationError(
                "lora.targets",
                found=f"patterns that take {min(left - {path})!r} and leave {missing[0]!r}",
                expected=f"all {len(names[path])} or none of the weights that {path} holds as one stack",
                remedy="give names without the number of a layer or an expert",
            )
        if left:
            matched.append(projection)
    if not matched:
        raise ConfigurationError(
            "lora.exclude", found="everything that lora.targets takes", expected="something left", remedy="exclude less"
        )
    return tuple(matched)


def _matcher(pattern: str, setting: str) -> Callable[[str], bool]:
    """Whether a name is meant by `pattern`: its last words, with or without numbers, or a regular expression of it."""
    if not re.search(r"[*+?\[\](){}|^$\\]", pattern):

        def fits(name: str) -> bool:
            plain = ".".join(word for word in name.split(".") if not word.isdigit())
            return f".{name}".endswith(f".{pattern}") or f".{plain}".endswith(f".{pattern}")

        return fits
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            setting, found=repr(pattern), expected="a regular expression", remedy=f"mend it: {error}"
        ) from None
    return lambda name: expression.fullmatch(name) is not None


def _no_match(
    setting: str, pattern: str, refused: Sequence[str], names: Mapping[str, Sequence[str]]
) -> ConfigurationError:
    if refused:
        return ConfigurationError(
            setting,
            found=f"{pattern!r}, which matches only {refused[0]} (of {len(refused)})",
            expected="projections: tables, heads, routers, norms and convolutions take no adapter",
            remedy="leave it out",
        )
    last_words = sorted({name.rsplit(".", 1)[-1] for path in names for name in (path, *names[path])})
    nearest = difflib.get_close_matches(pattern.rsplit(".", 1)[-1], last_words, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigurationError(
        setting,
        found=f"{pattern!r}, which matches nothing",
        expected="names, last words of names, all-linear or a regular expression of whole names",
        remedy=f"{hint}known last words: {', '.join(last_words)}",
    )


def scale_of(lora: LoraConfig) -> float:
    """What the product of the factors is multiplied by; the same for all of them, whatever their ranks."""
    return lora.alpha / (lora.rank**0.5 if lora.rank_stabilised else lora.rank)


def rank_of(projection: Projection, model: ModelConfig, lora: LoraConfig) -> int:
    """Width between the factors."""
    if not projection.num_experts:
        return lora.rank
    return lora.expert_rank or max(1, lora.rank // model.moe.experts_per_token)


@functools.cache
def _uniform(num_inputs: int) -> Callable[..., jax.Array]:
    """He's uniform numbers for a slope of sqrt(5), as `peft` draws A: within 1 / sqrt(inputs)."""
    bound = num_inputs**-0.5

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def make_factors(projection: Projection, model: ModelConfig, lora: LoraConfig) -> tuple[nnx.Variable, nnx.Variable]:
    """Abstract A [..., in..., r] and B [..., r, out...] of a projection, at least float32; B starts at zero.

    A rests split as the inputs of the weight, B as its outputs.
    """
    shape, array_axes = projection.shape, projection.array_axes
    stacked, leading, rank = projection.num_stacked, projection.num_leading, rank_of(projection, model, lora)
    end = leading + projection.num_inputs
    is_shared = bool(projection.num_experts) and lora.experts == "shared_down"
    num_inputs = int(np.prod(shape[leading:end]))
    dtype = at_least_float32(model.parameter_dtype)

    def factor(initializer: Any, shape: tuple[int, ...], array_axes: tuple[str | None, ...]) -> nnx.Variable:
        whole_shape = shape[len(shape) - len(array_axes) :]
        described = jax.ShapeDtypeStruct(shape, dtype)
        stack_axis = projection.stack_axis
        return LoraFactor(
            described, array_axes=array_axes, whole_shape=whole_shape, initializer=initializer, stack_axis=stack_axis
        )

    kept = shape[:stacked] if is_shared else shape[:leading]
    down_axes = array_axes[leading - stacked if is_shared else 0 : end - stacked]
    up_axes = (*array_axes[: leading - stacked], None, *array_axes[end - stacked :])
    down = factor(_uniform(num_inputs), (*kept, *shape[leading:end], rank), (*down_axes, None))
    up = factor(jax.nn.initializers.zeros, (*shape[:leading], rank, *shape[end:]), up_axes)
    return down, up


def define_adapted(model: ModelConfig, lora: LoraConfig, matched: Sequence[Projection]) -> ModelDefinition:
    """The definition of `model` with adapters on `matched`: only those are trained, everything else is frozen.

    Paths of the model's own arrays stay what they are; an adapter's factors are `<path>.down` and `<path>.up`. Routers
    are frozen, and so are their correction biases.
    """
    # What balancing counts is not needed: nothing would be moved by it.
    router = dataclasses.replace(model.moe.router, balancing="none")
    module = MultimodalModel(dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router)))
    module.decoder.is_head_trained = False
    for projection in matched:
        *words, name = path_of(projection.path)
        parent: Any = module
        for word in words:
            parent = parent[word] if isinstance(word, int) else getattr(parent, word)
        down, up = make_factors(projection, model, lora)
        base = None if projection.is_packed else getattr(parent, str(name))
        adapted = LoraWeight(base, down, up, scale=scale_of(lora), num_input_axes=projection.num_inputs)
        setattr(parent, str(name), adapted)
    return definition_of(module, LoraFactor)


def matched_lines(model: ModelConfig, lora: LoraConfig, matched: Iterable[Projection]) -> Iterator[tuple[str, str]]:
    """(path, what it gets) of each adapted projection, for printing."""
    for projection in matched:
        counted = [f"{number} layers" for number in projection.shape[: projection.num_stacked]]
        counted += [f"{projection.num_experts} experts"] if projection.num_experts else []
        kind = "packed, " if projection.is_packed else ""
        yield projection.path, f"{kind}{' x '.join(counted) or 'one'}, rank {rank_of(projection, model, lora)}"


def merge(
    model: ModelConfig, lora: LoraConfig, matched: Iterable[Projection], factors: Arrays, base: Arrays
) -> dict[str, Any]:
    """The arrays of the model without adapters whose outputs are the same: W + scale * A B for each adapted weight.

    `factors` and `base` hold the arrays of `define_adapted` by path (NumPy or JAX); what changes comes back as NumPy.
    Packed experts come back unpacked, in the parameter dtype: what is returned is a model of dense experts.
    """
    merged = {path: array for path, array in base.items() if not path.endswith(("_codes", "_scales"))}
    for path in base:
        if path.endswith("_codes"):
            name = path.removesuffix("_codes")
            packed: PackedWeight = {"codes": jnp.asarray(base[path]), "scales": jnp.asarray(base[f"{name}_scales"])}
            merged[name] = jnp.swapaxes(dequantize(packed, model.parameter_dtype), -1, -2)
    for projection in matched:
        merged[projection.path] = merge_part(np.asarray(merged[projection.path]), projection, lora, factors)
    return merged


def merge_part(
    weight: np.ndarray,
    projection: Projection,
    lora: LoraConfig,
    factors: Mapping[str, Any],
    index: tuple[int, ...] = (),
) -> np.ndarray:
    """`weight`, the part of an adapted one at `index` of its leading axes, + scale * A B, on the host.

    The sum is made in the factors' dtype and rounded once to that of the weight.
    """
    down, up = (np.asarray(factors[f"{projection.path}.{name}"]) for name in (DOWN, UP))
    is_shared = down.ndim < projection.num_leading + projection.num_inputs + 1
    down, up = down[index[: projection.num_stacked] if is_shared else index], up[index]
    leading = projection.num_leading - len(index)
    if is_shared and leading:
        # One A for all experts, whose axis is the last of those that are left.
        down = np.expand_dims(down, leading - 1)
    down = down.reshape(*down.shape[:leading], -1, down.shape[-1])
    change = np.matmul(down, up.reshape(*up.shape[: leading + 1], -1)) * scale_of(lora)
    return (weight.astype(change.dtype) + change.reshape(weight.shape)).astype(weight.dtype)
