"""A plan as a file: what the planner chose, as settings that a run takes, and what it predicts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.config import RunConfig, flatten, settings_with
from mmjax.errors import ConfigurationError, writing

# What a plan decides of a run.
PLANNED = (
    *("mesh.pipe", "mesh.replica", "mesh.fsdp", "mesh.context", "mesh.expert", "mesh.tensor", "mesh.device_order"),
    *("training.accumulation", "training.pipeline_schedule", "training.pipeline_transfer", "training.pipeline_edges"),
    *(
        "model.layer_loops",
        "model.remat",
        "model.remat_keep",
        "model.remat_offload",
        "model.pipeline_stages",
        "model.pipeline_chunks",
    ),
    *("model.moe.transport", "model.moe.node_devices", "model.moe.exchange_chunks", "model.moe.capacity_factor"),
)
# What it was made for; a run with other sizes may take it, and is told so.
_MADE_FOR = ("data.rows", "data.row_tokens", "data.row_patches", "model.width", "model.num_layers", "lora.rank")
_KIND = "mmjax plan"


def write_plan(path: Path, config: RunConfig, predicted: Mapping[str, Any]) -> None:
    """Write the plan of `config` with its predictions as JSON."""
    settings = flatten(config)
    content = {
        "kind": _KIND,
        "settings": {name: settings[name] for name in PLANNED},
        "made_for": {name: settings[name] for name in _MADE_FOR},
        "predicted": dict(predicted),
    }
    with writing(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan's file says of a run."""

    path: str
    settings: Mapping[str, Any]
    made_for: Mapping[str, Any]
    predicted: Mapping[str, Any]

    def applied(self, config: RunConfig) -> RunConfig:
        """`config` with what the plan decides.

        Raises:
          ConfigurationFaults: values of a wrong type.
        """
        return settings_with(config, self.settings, self.path)

    def differences(self, config: RunConfig) -> list[str]:
        """A line for each size that the plan was made for and `config` differs in."""
        found = flatten(config)
        return [
            f"{name} is {found[name]}, the plan was made for {value}"
            for name, value in self.made_for.items()
            if name in found and found[name] != value
        ]


def read_plan(path: Path) -> PlanFile:
    """The plan of a file that `write_plan` wrote.

    Raises:
      ConfigurationError: no such file, or not a plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise ValueError("JSON that is no plan")
        settings, made_for, predicted = content["settings"], content.get("made_for", {}), content.get("predicted", {})
        if not all(isinstance(part, dict) for part in (settings, made_for, predicted)):
            raise ValueError("settings that are no names and values")
        if strange := sorted(set(settings) - set(PLANNED)):
            raise ValueError(f"{strange[0]}, which a plan does not decide")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            str(path),
            found=" ".join(str(error).split()) or type(error).__name__,
            expected="a plan.json of `python -m mmjax.plan --output FOLDER`",
            remedy="check the path, or plan again",
        ) from error
    return PlanFile(path=str(path), settings=settings, made_for=made_for, predicted=predicted)
