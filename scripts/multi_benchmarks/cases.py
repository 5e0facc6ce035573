"""Every case of `bench_multi.py` for a number of GPUs, the most important first."""

from dataclasses import dataclass, field
from typing import Any

MODELS = {"k3_slice": "k3_slice_1xh200", "kimi_linear": "kimi_linear_lora_1xh200"}
"""Experiments of one GPU that are spread over several, by the name that cases have."""
# Under tests/mmjax: of meshes of eight devices, and those that take as many as there are.
MESH_TESTS = ("training/test_step", "training/test_lora_step", "training/test_pipeline_step")
TESTS = ("training/test_step", "models/test_moe_kernels")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process."""

    part: str
    name: str
    module: str
    """Of this folder: its `run(session, name, **arguments)` is called."""
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 40.0
    """How long it may use the GPUs."""
    needs: str = ""
    """The case whose results it compares its own with."""
    is_timed: bool = True
    is_free: bool = False
    """It uses the GPUs without a turn, and is ended when timings begin."""
    is_large: bool = False
    """It takes half of a GPU's memory or more, so no other may hold some."""


def meshes_of(number: int) -> list[str]:
    """Meshes of so many devices, each axis in one of them; in a step the first is the one that must be fast."""
    if number == 1:
        return []
    half = number // 2
    split = [("tensor", "expert"), ("pipe", "expert"), ("context", "expert"), ("replica", "fsdp")]
    halves = [f"{axis}=2,{other}={half}" if half > 1 else f"{axis}=2" for axis, other in split]
    return [f"expert={number}", f"fsdp={number}", *halves]


def cases_for(number: int) -> list[Case]:
    """
    Raises:
      ValueError: a number that the meshes do not divide.
    """
    if number not in (1, 2, 4, 8):
        raise ValueError(f"{number} devices: the meshes are for 1, 2, 4 or 8")
    meshes = meshes_of(number)
    cases = [Case(part="environment", name="environment", module="environment", is_timed=False)]
    if number > 1:
        cases.append(Case(part="links", name="links", module="links", seconds=40))
    for model in MODELS:
        cases += [_step(model, mesh) for mesh in ["", *meshes[:1]]]
    if number > 1:
        # GPUs differ, and a step on several goes at the pace of the slowest.
        cases += [_step(model, "", "the last", gpu=number - 1) for model in MODELS]
    comparison = "gradients one GPU"
    pipelines = [mesh for mesh in meshes if "pipe" in mesh]
    ways: list[tuple[str, str, dict[str, Any]]] = [("one GPU", "", {}), *((mesh, mesh, {}) for mesh in meshes)]
    # All stages in one program.
    ways += [(f"{mesh}, one program", mesh, {"model": {"layer_loops": "whole"}}) for mesh in pipelines]
    ways += [(f"{meshes[0]}, {name}", meshes[0], {"moe": moe}) for name, moe in transports(number).items()]
    cases += [
        Case(
            part="meshes",
            name=f"gradients {name}",
            module="meshes",
            arguments={"mesh": mesh, "changes": changes},
            needs=comparison if mesh else "",
            is_timed=False,
        )
        for name, mesh, changes in ways
    ]
    for model in MODELS:
        cases += _variants(model, meshes[0] if meshes else "", number)
    if number > 1:
        cases.append(Case(part="transports", name="exchange alone", module="exchange"))
    # What split positions give is in the table of gradients; these are the meshes that must be timed.
    cases += [_step(model, mesh) for mesh in meshes[1:4] for model in MODELS]
    # Its arrays lie otherwise than those of stages by themselves, so there is nothing to compare their gradients with.
    cases += [_step("k3_slice", mesh, "one program", {"model": {"layer_loops": "whole"}}) for mesh in pipelines]
    cases += [
        Case(
            part="tests",
            name=f"tests {name.split('/')[1]}",
            module="mesh_tests",
            arguments={"file": f"tests/mmjax/{name}.py"},
            is_timed=False,
            is_free=True,
        )
        for name in (MESH_TESTS if number >= 8 else TESTS)
        if number > 1
    ]
    return cases


def transports(number: int) -> dict[str, dict[str, Any]]:
    """Ways in which rows get to experts and back, beside the plain one, by name: settings of the mixture."""
    if number == 1:
        return {}
    return {
        "ring": {"transport": "ring"},
        "two chunks": {"exchange_chunks": 2},
        "by node": {"transport": "by_node", "node_devices": number},
        "ragged": {"transport": "ragged"},
    }


def _step(model: str, mesh: str, name: str = "", changes: dict[str, Any] | None = None, gpu: int = 0) -> Case:
    return Case(
        part="steps",
        name=f"{model} {mesh or 'one GPU'}{name and f', {name}'}",
        module="steps",
        arguments={"experiment": MODELS[model], "mesh": mesh, "changes": changes, "gpu": gpu},
        is_large=model == "kimi_linear",
    )


def _variants(model: str, mesh: str, number: int) -> list[Case]:
    """The step of the first mesh in other ways, compared with it."""
    chunks, kept = {"exchange_chunks": 2}, {"remat_keep": ("experts",)}
    hiding = "xla_gpu_enable_latency_hiding_scheduler"
    channels = "xla_gpu_nccl_p2p_max_nchannels", "xla_gpu_nccl_collective_max_nchannels"
    ways = transports(number)
    changes = [("transports", name, {"moe": ways[name]}) for name in ("ring", "two chunks") if name in ways]
    if number > 1:
        changes.append(("scheduler", "8 channels", {"compiler": dict.fromkeys(channels, 8)}))
    if number > 1 and model == "kimi_linear":
        changes += [
            ("offload", "experts kept", {"model": kept}),
            ("transports", "experts kept, ring", {"model": kept, "moe": ways["ring"]}),
        ]
    if model == "k3_slice":
        changes += [("transports", name, {"moe": ways[name]}) for name in ("by node", "ragged") if name in ways]
        changes += [
            ("scheduler", "latency hiding off", {"compiler": {hiding: False}}),
            ("scheduler", "latency hiding on", {"compiler": {hiding: True}}),
            ("scheduler", "4 exchanges at once", {"training": {"exchanges_at_once": 4}}),
            ("scheduler", "10 exchanges at once", {"training": {"exchanges_at_once": 10}}),
            ("scheduler", "two chunks, 10 at once", {"moe": chunks, "training": {"exchanges_at_once": 10}}),
            ("scheduler", "two chunks, level O1", {"moe": chunks, "optimization_level": "O1"}),
        ] * (number > 1)
        changes += [
            ("offload", "attention on the host", {"model": {"remat_offload": ("attention",)}}),
            ("offload", "attention kept", {"model": {"remat_keep": ("attention", "experts")}}),
            ("offload", "nothing kept", {"model": {"remat_keep": ()}}),
        ]
    base = f"{model} {mesh or 'one GPU'}"
    return [
        Case(
            part=part,
            name=f"{base}, {name}",
            module="steps",
            arguments={"experiment": MODELS[model], "mesh": mesh, "changes": change, "base": base},
            needs=base,
            is_large=model == "kimi_linear",
        )
        for part, name, change in changes
    ]
