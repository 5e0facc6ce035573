"""Adapters outside of a run: what a run adapts, the weights its base comes from, and `peft` files in and out."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.checkpoint.arrays import CheckedReader
from mmjax.checkpoint.codecs import MXFP4
from mmjax.checkpoint.convert import EXPORTED, TENSORS, replacing
from mmjax.checkpoint.manifest import MANIFEST, Damage, check_files, describe_files, read_manifest, write_manifest
from mmjax.checkpoint.peft import export_adapter, read_adapter
from mmjax.checkpoint.weights import ARRAYS, RELEASED, read_contents, read_step
from mmjax.config import LoraConfig, ModelConfig, RunConfig
from mmjax.errors import CheckpointError, ConfigurationError
from mmjax.models.families import family_of
from mmjax.models.families.released import ReleasedTensor
from mmjax.models.layout import Relayout, without_pipeline
from mmjax.models.lora import Projection, define_adapted, match, merge_part
from mmjax.models.multimodal import ModelDefinition, define


def define_run(config: RunConfig) -> ModelDefinition:
    """The definition of what `config` trains: its model, parts of it, or adapters around it.

    Raises:
      ConfigurationError: `lora.targets`, `lora.exclude` or `trained` do not fit the model.
    """
    if not config.lora.rank:
        return define(config.model, config.trained)
    return _define_adapted(config.model, config.lora, config.weights)


@functools.lru_cache(maxsize=8)
def _define_adapted(model: ModelConfig, lora: LoraConfig, weights: str) -> ModelDefinition:
    return define_adapted(model, lora, matched_projections(model, lora, weights))


@functools.lru_cache(maxsize=8)
def matched_projections(model: ModelConfig, lora: LoraConfig, weights: str) -> tuple[Projection, ...]:
    """What `lora` adapts. Released names are known where the weights are a converted checkpoint.

    Raises:
      ConfigurationError: as `lora.match`.
    """
    return match(model, lora, released_tensors(model, weights) if weights else ())


def released_tensors(model: ModelConfig, weights: str) -> Iterator[ReleasedTensor]:
    """The tensors that the converted checkpoint `weights` was made of.

    Raises:
      CheckpointError: the folder is no whole converted checkpoint.
    """
    read_contents(weights)
    return family_of(_released_config(weights)).released_tensors(model)


def check_base(config: RunConfig, saved: dict[str, str]) -> None:
    """Refuse to go on with adapters on another model than they were trained on.

    Raises:
      CheckpointError: the digests differ.
    """
    here = base_of(config)
    if here["digest"] != saved["digest"]:
        raise CheckpointError(
            config.weights or config.run_dir,
            found=f"weights with digest {here['digest']}",
            expected=f"those that the adapters were trained on: {saved['weights'] or 'none'}, digest {saved['digest']}",
            remedy="give --weights with the same converted checkpoint, or another --run-dir for another run",
        )


def base_of(config: RunConfig) -> dict[str, str]:
    """What the frozen model of a run is, to be kept with its adapters: a folder and the digest of its manifest."""
    if not config.weights:
        return {"weights": "", "digest": f"random numbers of seed {config.seed}"}
    read_contents(config.weights)
    manifest = json.loads((Path(config.weights) / MANIFEST).read_bytes())
    return {"weights": str(Path(config.weights).absolute()), "digest": manifest["digest"]}


def read_start(config: RunConfig) -> dict[str, np.ndarray]:
    """The factors, by path, of the `peft` adapter that `lora.start` names.

    Raises:
      ConfigurationError: the run has no converted checkpoint, whose names the adapter's are.
      CheckpointError: it is no adapter of this model and these settings, or was exported from another base.
    """
    _need_weights(config.weights, "lora.start")
    _check_exported(config)
    matched = matched_projections(config.model, config.lora, config.weights)
    released = released_tensors(config.model, config.weights)
    kind = _released_config(config.weights)["model_type"]
    return read_adapter(config.lora.start, config.model, config.lora, matched, released, kind)


def _check_exported(config: RunConfig) -> None:
    """Files that `export_run` has written say what they are and on which base they were trained; others do not."""
    folder = Path(config.lora.start)
    if not (folder / MANIFEST).is_file():
        return
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except Damage as damage:
        raise CheckpointError(
            str(folder), found=str(damage), expected="what the export wrote", remedy="export the adapter again"
        ) from None
    base, here = manifest.get("base"), base_of(config)
    if base is not None and base["digest"] != here["digest"]:
        raise CheckpointError(
            str(folder),
            found=f"an adapter of {base['weights']}, digest {base['digest']}",
            expected=f"one of {here['weights']}, digest {here['digest']}",
            remedy=f"give --weights {base['weights']}; if the two hold the same model, remove {folder / MANIFEST}",
        )


def export_run(config: RunConfig, step: Path, target: Path, *, overwrite: bool = False) -> None:
    """Write the adapters of a saved step of a run as `peft` files, with tokenizer, processor and template beside them.

    Raises:
      ConfigurationError: the run trains no adapters, or its base has no released names.
      CheckpointError: the base is another one now, or `target` cannot be written.
    """
    config, factors = _read_factors(config, step)
    matched = matched_projections(config.model, config.lora, config.weights)
    released = released_tensors(config.model, config.weights)
    source = Path(config.weights) / RELEASED
    described = _released_config(config.weights)
    name, kind = described.get("_name_or_path") or str(source.absolute()), described["model_type"]
    with replacing(target, overwrite=overwrite) as folder:
        export_adapter(folder, config.model, config.lora, matched, released, kind, factors, name)
        for file in sorted(source.iterdir()):
            if not file.name.startswith(("config", "generation_config", TENSORS)) and file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
        base = {"base": base_of(config)}
        write_manifest(folder, {"kind": EXPORTED, "format": 1, "files": describe_files(folder), **base})


def merged_arrays(config: RunConfig, step: Path) -> tuple[Callable[[str, tuple[int, ...]], np.ndarray], set[str]]:
    """How to read the arrays of a run's model with its adapters merged into them, part by part, and which there are.

    Sums are made in at least float32 and rounded once to the dtype that the base rests in. Where adapters stand around
    packed experts, all packed experts come as [in, out] in bfloat16; else they stay packed.

    Raises:
      ConfigurationError: the run trains no adapters, or its base is no converted checkpoint.
      CheckpointError: the base is another one now.
    """
    config, factors = _read_factors(config, step)
    matched = {p.path: p for p in matched_projections(config.model, config.lora, config.weights)}
    entries = read_contents(config.weights)["arrays"]
    base, paths = CheckedReader(Path(config.weights) / ARRAYS, entries), set(entries)
    is_unpacked = any(projection.is_packed for projection in matched.values())
    packed = {path.removesuffix("_codes") for path in paths if path.endswith("_codes")} if is_unpacked else set()
    paths = (paths - {f"{path}_{part}" for path in packed for part in ("codes", "scales")}) | packed

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        if path in packed:
            codes, scales = (base.read(f"{path}_{part}", index) for part in ("codes", "scales"))
            weight = MXFP4.decode({"weight_packed": codes, "weight_scale": scales}).swapaxes(-1, -2)
        else:
            weight = base.read(path, index)
        return merge_part(weight, matched[path], config.lora, factors, index) if path in matched else weight

    return read, paths


def _read_factors(config: RunConfig, step: Path) -> tuple[RunConfig, dict[str, np.ndarray]]:
    """The run as it is without a pipeline, and its adapters by path."""
    if not config.lora.rank:
        raise ConfigurationError(
            config.run_dir,
            found="a run that trains the model itself",
            expected="a run with lora.rank",
            remedy="leave it out",
        )
    _need_weights(config.weights, config.run_dir)
    manifest = read_step(step)
    check_base(config, manifest["metadata"]["base"])
    reader = CheckedReader(step, manifest["arrays"])
    factors = {path: reader.read(f"parameters.{path}") for path in define_run(config).parameters}
    plain = dataclasses.replace(config, model=without_pipeline(config.model))
    return plain, Relayout(config.model, plain.model).apply(factors, define_run(plain).parameters, np)


def _need_weights(weights: str, where: str) -> None:
    if not weights:
        raise ConfigurationError(
            where,
            found="no --weights",
            expected="a converted checkpoint, whose names are used",
            remedy="give --weights",
        )


def _released_config(weights: str) -> dict[str, Any]:
    return json.loads((Path(weights) / RELEASED / "config.json").read_text(encoding="utf-8"))
