"""The settings kept beside a run, in `config.yaml` of its folder: what the run is, and what may not change under it."""

import os
from pathlib import Path

from mmjax.config.fault import ConfigurationFaults, Fault
from mmjax.config.settings import RunConfig
from mmjax.config.yaml_text import flatten, from_yaml, to_yaml
from mmjax.errors import ConfigurationError, writing

FILE_NAME = "config.yaml"

# Settings that another start of the same run may change: where, how long, how often and how fast, not what is learnt.
_MAY_CHANGE = (
    "run_dir",
    # Where they lie: that they are the same is checked by their digest.
    "weights",
    "audio_weights",
    "mesh.",
    "checkpoint.",
    "training.",
    "data.prefetch_batches",
    # What stops a run, which a person may want to go on all the same: the order of samples does not depend on it.
    "data.max_bad_samples",
    "data.max_bad_share",
    "data.lost_source",
    "model.remat",
    "model.remat_keep",
    "model.remat_offload",
    "model.moe.transport",
    "model.moe.node_devices",
    "model.moe.exchange_chunks",
    "model.moe.expert_axes",
    "model.loss_chunk_tokens",
    "model.linear_attention.chunk_tokens",
    "model.gated_delta_net.chunk_tokens",
    "model.full_attention.query_chunk_tokens",
    "model.full_attention.deterministic_gradients",
    "model.grouped_attention.query_chunk_tokens",
)


def load(file: str | Path) -> RunConfig:
    """Read a configuration file.

    Raises:
      ConfigurationError: the file cannot be read, or what `from_yaml` refuses.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise ConfigurationError(
            str(file), found=str(reason), expected="a configuration file (YAML)", remedy="check the path"
        ) from error
    return from_yaml(text, str(file))


def check_same_run(config: RunConfig) -> None:
    """A folder whose only file is `config.yaml` holds no work yet and may be taken over.

    Raises:
      ConfigurationFaults: a different run lives in the run folder: settings differ from those it was started with.
    """
    folder = Path(config.run_dir)
    file = folder / FILE_NAME
    if not file.exists() or not any(entry.is_file() and entry != file for entry in folder.rglob("*")):
        return
    started, given = flatten(load(file)), flatten(config)
    faults = [
        Fault(
            path=path,
            found=f"{given[path]!r}; the run was started with {started[path]!r}",
            remedy="give the same again to go on, or another --run-dir for another run",
        )
        for path in given
        if given[path] != started[path] and not path.startswith(_MAY_CHANGE)
    ]
    if faults:
        raise ConfigurationFaults(f"{folder} holds a different run", faults)


def save(config: RunConfig) -> Path:
    """Write `config` into its run folder.

    Raises:
      CheckpointError: the folder cannot be written.
    """
    folder = Path(config.run_dir)
    file = folder / FILE_NAME
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{FILE_NAME}.{os.getpid()}.unfinished"
        unfinished.write_text(to_yaml(config), encoding="utf-8")
        unfinished.replace(file)
    return file
