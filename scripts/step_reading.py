"""Add a timed training step to a file of readings: `python scripts/step_reading.py EXPERIMENT --seconds 1.221 ...`.

The reading holds those of the experiment's settings that cost time, as they are now, so that it stays true when the
experiment changes. What the planner makes of the file: `python -m mmjax.plan fit --readings FILE`.
"""

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

from mmjax.config import RunConfig, flatten, settings_with
from mmjax.planner.readings import StepReading, load
from mmjax.training.dry_run import tuning_of

# What sets the time of a step. Adapters are in the reading's `tuning`.
COSTLY = (
    "model.",
    "mesh.",
    "data.row",
    "data.image_max_patches",
    "training.accumulation",
    "training.pipeline",
    "optimizer.name",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--seconds", type=float, required=True, help="of one step, the median")
    parser.add_argument("--source", required=True, help="where and when it was read")
    parser.add_argument("--cluster", default="1x1xh200")
    parser.add_argument("--readings", type=Path, default=Path("docs/readings/h200.json"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="settings that the run changed")
    arguments = parser.parse_args()
    config: RunConfig = importlib.import_module(f"experiments.{arguments.experiment}").run()
    changes = {name: json.loads(value) for name, value in (one.split("=", 1) for one in arguments.set)}
    config = settings_with(config, changes, "--set")
    defaults = flatten(RunConfig())
    reading = StepReading(
        name=" ".join([arguments.experiment, *arguments.set]),
        cluster=arguments.cluster,
        settings={
            name: value
            for name, value in flatten(config).items()
            if name.startswith(COSTLY) and value != defaults[name]
        },
        tuning=dataclasses.asdict(tuning_of(config)),
        seconds=arguments.seconds,
        source=arguments.source,
    )
    readings = load(arguments.readings)
    others = [step for step in readings.steps if step.name != reading.name]
    dataclasses.replace(readings, steps=(*others, reading)).save(arguments.readings)


if __name__ == "__main__":
    main()
