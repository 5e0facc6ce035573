"""Adapters as files of `peft`, out and in: names of modules and parameters as the model has them in transformers."""

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.checkpoint.manifest import listed
from mmjax.checkpoint.safetensors_files import MappedFiles, read_header, write_file
from mmjax.config import LoraConfig, ModelConfig
from mmjax.errors import CheckpointError
from mmjax.models.families.released import ReleasedTensor
from mmjax.models.lora import DOWN, UP, Projection, make_factors, projections, rank_of, scale_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."

# How transformers renames modules while it loads a checkpoint, by model_type: (pattern, replacement), in order.
_LANGUAGE_MODEL = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model(?=\.)", "model.language_model"),
    (r"^(vision_tower|multi_modal_projector|vision_embed_tokens)(?=\.|$)", r"model.\1"),
)
_FORGET_GATE = (r"\.self_attn\.(f_[ab]_proj)$", r".self_attn.forget_gate.\1")
_SPARSE_MLP = (r"\.block_sparse_moe\.", ".mlp.")
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "kimi_linear": (_FORGET_GATE, _SPARSE_MLP),
    "minimax_m2": (_SPARSE_MLP,),
    "glm5_next": (_FORGET_GATE,),
    "glm5_next_text": (_FORGET_GATE,),
    "llava": _LANGUAGE_MODEL,
    "llava_next": _LANGUAGE_MODEL,
    "fuyu": _LANGUAGE_MODEL,
}
# Families whose experts are modules of their own also in memory: their vendor's code runs them. All others are held by
# transformers as two parameters of all experts, `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F].
_SINGLE_EXPERTS = ("kimi_k3", "kimi_k31")
# Families for which peft takes these names among `target_modules` for experts', wherever the modules are: their weights
# are named as parameters instead, which gives the same tensors.
_TAKEN_FOR_EXPERTS = ("deepseek_v3", "deepseek_v32", "qwen3_moe", "qwen3_next")
# Modules of the transformers model that are no part of ours, though some have the last words of ours.
_LEFT_OUT = {"glm5_next": r"model\.visual\..*"}
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class _Part(NamedTuple):
    """One of our weights, or all experts of one layer."""

    projection: Projection
    index: tuple[int, ...]
    """Along the leading axes of our array."""
    is_adapted: bool

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.projection.shape[self.projection.num_leading + self.projection.num_inputs :]

    @property
    def input_shape(self) -> tuple[int, ...]:
        leading = self.projection.num_leading
        return self.projection.shape[leading : leading + self.projection.num_inputs]

    @property
    def is_stack(self) -> bool:
        """Whether factors have an axis of experts here."""
        return len(self.index) < self.projection.num_leading


@dataclass(frozen=True)
class _Module:
    """A linear module of the transformers model, or a parameter of all experts, and our weights that it holds."""

    name: str
    parts: tuple[_Part, ...]
    tensor: ReleasedTensor | None
    """The released tensor of a linear module; None for a parameter of experts: parts one after the other."""

    def rank(self, model: ModelConfig, lora: LoraConfig) -> int:
        return sum(rank_of(part.projection, model, lora) for part in self.parts if part.is_adapted)

    def join(self, ups: Sequence[np.ndarray]) -> np.ndarray:
        """B of each part [..., r, out...] -> lora_B [..., out, r]."""
        if self.tensor is None:
            return np.concatenate(ups, axis=-1).swapaxes(-1, -2)
        return self.tensor.layout.to_released(ups, (self.tensor.shape[0], len(ups[0])))

    def split(self, up: np.ndarray) -> list[np.ndarray]:
        """The inverse of `join`."""
        if self.tensor is None:
            ends = np.cumsum([math.prod(part.output_shape) for part in self.parts])
            return np.split(up.swapaxes(-1, -2), ends[:-1], axis=-1)
        return self.tensor.layout.to_ours(up, [(up.shape[-1], *part.output_shape) for part in self.parts])


def module_name(released: str, model_type: str) -> str:
    """The module that holds a released tensor, as transformers calls it."""
    name = released.removesuffix(".weight").removesuffix(".bias")
    for pattern, replacement in _RENAMED.get(model_type, ()):
        name = re.sub(pattern, replacement, name)
    return name


def export_adapter(
    folder: Path | str,
    model: ModelConfig,
    lora: LoraConfig,
    matched: Sequence[Projection],
    released: Iterable[ReleasedTensor],
    model_type: str,
    factors: Mapping[str, Any],
    base_name: str = "",
) -> None:
    """Write `factors` (by path) as adapter_config.json and adapter_model.safetensors into `folder`.

    Where a released weight holds several of ours, their adapters become one whose rank is the sum: A stacked, B block
    by block. Experts that transformers holds as parameters go under `target_parameters` (peft 0.18 or newer).
    """
    released = list(released)
    modules = _modules(model, matched, released, model_type)
    tensors: dict[str, np.ndarray] = {}
    parameters = {module.name for module in modules if module.tensor is None}
    for module in modules:
        down, up = _joined(module, lora, module.rank(model, lora), factors)
        lora_a, lora_b = _keys(module.name, parameters)
        if module.tensor is None:
            # A by expert, then rank; B by rank, then expert.
            down, up = down.reshape(-1, down.shape[-1]), up.transpose(1, 2, 0).reshape(up.shape[1], -1)
        tensors |= {lora_a: down, lora_b: up}
    names = {module_name(tensor.name, model_type) for tensor in released}
    others = sorted(names - {module.name for module in modules})
    ranks = {module.name: module.rank(model, lora) for module in modules}
    as_parameters = {
        name
        for name in ranks.keys() - parameters
        if model_type in _TAKEN_FOR_EXPERTS and name.endswith(("gate_proj", "up_proj", "down_proj"))
    }
    odd = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    scale = scale_of(lora)
    odd_keys = {rank: _shortest(sorted(n for n in odd if odd[n] == rank), [*others, *ranks]) for rank in odd.values()}
    rank_pattern = {re.escape(key): rank for rank, keys in odd_keys.items() for key in keys}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilised,
        "rank_pattern": rank_pattern,
        # The scale is the same everywhere.
        "alpha_pattern": {
            key: scale * (math.sqrt(rank) if lora.rank_stabilised else rank) for key, rank in rank_pattern.items()
        },
        "target_modules": _shortest(sorted(ranks.keys() - parameters - as_parameters), [*others, *ranks]),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if parameters or as_parameters:
        config["target_parameters"] = [
            *_shortest(sorted(parameters), others),
            *(f"{name}.weight" for name in _shortest(sorted(as_parameters), [*others, *ranks])),
        ]
    if model_type in _LEFT_OUT:
        config["exclude_modules"] = _LEFT_OUT[model_type]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in sorted(tensors.items())}
    write_file(
        folder / WEIGHTS,
        {name: (array.dtype, array.shape) for name, array in arrays.items()},
        ((name, iter([array])) for name, array in arrays.items()),
        {"format": "pt"},
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _shortest(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Last words that mean all of `names` and none of `others` that is not among them."""
    chosen, taken = [], set(names)
    endings: dict[str, bool] = {}
    for name in others:
        if name not in taken:
            words = name.split(".")
            endings |= {".".join(words[-count:]): False for count in range(1, len(words) + 1)}
    for name in names:
        words = name.split(".")
        ending = next(e for n in range(1, len(words) + 1) if (e := ".".join(words[-n:])) not in endings)
        chosen.append(ending)
    return sorted(set(chosen))


def _modules(
    model: ModelConfig, matched: Sequence[Projection], released: Iterable[ReleasedTensor], model_type: str
) -> list[_Module]:
    """The modules that adapters on `matched` go to."""
    able, adapted = projections(model), {projection.path for projection in matched}
    modules: dict[str, _Module] = {}
    for tensor in released:
        if not any(slot.path in adapted for slot in tensor.slots):
            continue
        name, first = module_name(tensor.name, model_type), able[tensor.slots[0].path]
        if not first.num_experts or model_type in _SINGLE_EXPERTS:
            parts = (_Part(able[slot.path], slot.index, slot.path in adapted) for slot in tensor.slots)
            modules[name] = _Module(name, tuple(parts), tensor)
            continue
        for slot in tensor.slots:
            layer, kind = slot.path.rsplit(".", 1)
            parameter = re.sub(r"\.experts\..*$", f".experts.{_FUSED[kind]}", name)
            if slot.path in adapted and parameter not in modules:
                index = slot.index[: first.num_stacked]
                paths = [f"{layer}.{other}" for other in _FUSED if _FUSED[other] == _FUSED[kind]]
                parts = (_Part(able[path], index, path in adapted) for path in paths)
                modules[parameter] = _Module(parameter, tuple(parts), None)
    return list(modules.values())


def _keys(name: str, parameters: Container[str]) -> tuple[str, str]:
    """Names of the two tensors of a module, or of a parameter of experts: that is wrapped around its module."""
    if name in parameters:
        container, parameter = name.rsplit(".", 1)
        # The wrapper of the first parameter lies inside that of the second.
        is_inner = parameter == "gate_up_proj" and f"{container}.down_proj" in parameters
        name = f"{container}.base_layer" if is_inner else container
    return f"{_ROOT}{name}.lora_A.weight", f"{_ROOT}{name}.lora_B.weight"


def _joined(module: _Module, lora: LoraConfig, rank: int, factors: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """lora_A [..., r, in] and lora_B [..., out, r] of a module: A of the parts stacked, B block by block."""
    downs, ups, start = [], [], 0
    for part in module.parts:
        path, index, projection = part.projection.path, part.index, part.projection
        experts = (projection.num_experts,) if part.is_stack else ()
        block = np.zeros((*experts, rank, *part.output_shape), np.float32)
        if part.is_adapted:
            is_shared = bool(projection.num_experts) and lora.experts == "shared_down"
            down = np.asarray(factors[f"{path}.{DOWN}"])[index[: projection.num_stacked] if is_shared else index]
            up = np.asarray(factors[f"{path}.{UP}"])[index]
            own = up.shape[len(experts)]
            block = block.astype(up.dtype)
            block[(*[slice(None)] * len(experts), slice(start, start + own))] = up
            start += own
            down = np.broadcast_to(down, (*experts, *part.input_shape, own))
            downs.append(down.reshape(*experts, -1, own).swapaxes(-1, -2))
        ups.append(block)
    return np.concatenate(downs, axis=-2), module.join(ups)


def read_adapter(
    folder: Path | str,
    model: ModelConfig,
    lora: LoraConfig,
    matched: Sequence[Projection],
    released: Iterable[ReleasedTensor],
    model_type: str,
) -> dict[str, np.ndarray]:
    """The factors, by path, of an adapter that `peft` or `export_adapter` has written.

    Raises:
      CheckpointError: it is no LoRA adapter, or its rank, scale or modules are not those of `lora`.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        header, _ = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise _refused(
            folder, f"{type(error).__name__}: {error}", f"{CONFIG} and {WEIGHTS}", "check the path"
        ) from None
    _check_config(folder, config, lora)
    modules = _modules(model, matched, list(released), model_type)
    parameters = {module.name for module in modules if module.tensor is None}
    wanted = {key for module in modules for key in _keys(module.name, parameters)}
    if header.keys() != wanted:
        missing, left = sorted(wanted - header.keys()), sorted(header.keys() - wanted)
        found = [f"no {listed(missing)}"] * bool(missing) + [f"{listed(left)} besides"] * bool(left)
        raise _refused(folder, "; ".join(found), "the modules of lora.targets", "give the adapter's own targets")
    shapes = {path: tuple(v.get_value().shape) for p in matched for path, v in _variables(p, model, lora)}
    result = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    files = MappedFiles()
    for module in modules:
        lora_a, lora_b = (np.asarray(files.read(header[key]), np.float32) for key in _keys(module.name, parameters))
        if not (np.isfinite(lora_a).all() and np.isfinite(lora_b).all()):
            raise _refused(folder, f"NaN or infinite numbers in {module.name}", "sound numbers", "export again")
        scale = _scale(folder, config, module.name) / scale_of(lora)
        if module.tensor is None:
            experts = module.parts[0].projection.num_experts
            lora_a = lora_a.reshape(experts, -1, lora_a.shape[-1])
            lora_b = lora_b.reshape(lora_b.shape[0], -1, experts).transpose(2, 0, 1)
        if lora_a.shape[-2] != lora_b.shape[-1]:
            raise _refused(folder, f"{module.name} with A {lora_a.shape}, B {lora_b.shape}", "one rank", "export again")
        first, is_as_here = 0, lora_a.shape[-2] == module.rank(model, lora)
        for part, up in zip(module.parts, module.split(lora_b * np.float32(scale)), strict=True):
            _put(folder, part, module.name, lora_a, up, result, lora, first if is_as_here else None)
            first += rank_of(part.projection, model, lora) * part.is_adapted
    return result


def _put(
    folder: Path,
    part: _Part,
    name: str,
    down: np.ndarray,
    up: np.ndarray,
    result: dict[str, np.ndarray],
    lora: LoraConfig,
    first: int | None,
) -> None:
    """Set the factors of a part: of the rank's directions those that reach it, which may be no more than it has.

    `first`: where its own directions begin if the file's parts have their own, one after the other, as written here.
    """
    axes = tuple(axis for axis in range(up.ndim) if axis != int(part.is_stack))
    reached = np.flatnonzero(np.abs(up).max(axis=axes) > 0)
    path, projection = part.projection.path, part.projection
    if not part.is_adapted:
        if len(reached):
            raise _refused(
                folder, f"{name}, which adapts {path} too", "what lora.targets takes", "give its own targets"
            )
        return
    is_shared = bool(projection.num_experts) and lora.experts == "shared_down"
    place = part.index[: projection.num_stacked] if is_shared else part.index
    own = result[f"{path}.{UP}"].shape[projection.num_leading]
    rank = down.shape[-2]
    if first is not None and np.isin(reached, np.arange(first, first + own)).all():
        reached = np.arange(first, first + own)
    elif len(reached) > own:
        raise _refused(folder, f"rank {len(reached)} in {name}", f"rank {own} at most", "merge it in peft")
    else:
        # Where A and B are both zero nothing is ever learnt: what is free takes directions whose B is zero.
        others = np.setdiff1d(np.arange(rank), reached)
        reached = np.concatenate([reached, others])[:own]
    chosen = np.zeros((*down.shape[:-2], own, down.shape[-1]), np.float32)
    chosen[..., : len(reached), :] = down[..., reached, :]
    target = result[f"{path}.{DOWN}"][place]
    if is_shared:
        one = chosen[0] if part.is_stack else chosen
        # Experts of their own come one after the other: all must bring what the first has brought.
        known = target.reshape(-1, own).swapaxes(-1, -2) if not part.is_stack and part.index[-1] else one
        if np.any(chosen != one) or np.any(one != known):
            raise _refused(folder, f"{name} with an A of each expert", "one A", "give --lora.experts per_expert")
        chosen = one
    target[...] = chosen.swapaxes(-1, -2).reshape(target.shape)
    where = (*[slice(None)] * int(part.is_stack), slice(len(reached)))
    result[f"{path}.{UP}"][part.index][where] = up.take(reached, axis=int(part.is_stack))


def _variables(projection: Projection, model: ModelConfig, lora: LoraConfig) -> Iterator[tuple[str, Any]]:
    for name, variable in zip((DOWN, UP), make_factors(projection, model, lora), strict=True):
        yield f"{projection.path}.{name}", variable


def _scale(folder: Path, config: Mapping[str, Any], name: str) -> float:
    """What `peft` multiplies the product of a module's factors by.

    Raises:
      CheckpointError: the configuration has no such number, or it is 0.
    """

    def of(pattern: str, default: float) -> float:
        patterns = config.get(pattern) or {}
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    try:
        rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
        scale = float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, re.error) as error:
        found = f"{type(error).__name__}: {error}"
        raise _refused(folder / CONFIG, found, "the numbers r and lora_alpha", "export again") from None
    if not (math.isfinite(scale) and scale):
        raise _refused(folder / CONFIG, f"a scale of {scale:g} for {name}", "one that is not 0", "export again")
    return scale


def _check_config(folder: Path, config: Any, lora: LoraConfig) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _refused(folder / CONFIG, "no LoRA adapter", "peft_type LORA", "give another adapter")
    for name in ("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication"):
        if config.get(name):
            raise _refused(
                folder / CONFIG, f"{name}={config[name]}", "plain LoRA", "it is not supported: merge it first"
            )
    if config.get("bias", "none") != "none":
        raise _refused(folder / CONFIG, f"bias={config['bias']}", "none", "it is not supported: merge it first")
    if config.get("r") != lora.rank:
        raise _refused(
            folder / CONFIG, f"r={config.get('r')}", f"lora.rank={lora.rank}", f"--lora.rank {config.get('r')}"
        )


def _refused(where: Path, found: str, expected: str, remedy: str) -> CheckpointError:
    return CheckpointError(str(where), found=found, expected=expected, remedy=remedy)
