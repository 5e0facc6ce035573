"""Ours beside published numbers: scans, shares of communication, exchanges, cuts and plans, as tables and plots.

    python scripts/bench_planner.py [--output FOLDER]

Seconds on one core. What published numbers mean exactly is not known here: each table says what ours count.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from planner_benchmarks.models import llava_1_5_13b, pictures, qwen_vl_7b
from rich.console import Console
from rich.table import Table

from mmjax.config import MeshConfig, ModelConfig, RunConfig, TrainingConfig, layer_kinds
from mmjax.planner.all_to_all import plan_all_to_all
from mmjax.planner.collectives import Group, all_gather_seconds, all_reduce_seconds
from mmjax.planner.compute_time import PEER_SHARES
from mmjax.planner.cost import Branch, alignment_penalty, forward_flops, golden_cost, vision_forward_flops
from mmjax.planner.exchange_simulation import Network, Outcome
from mmjax.planner.hardware import Cluster, Link
from mmjax.planner.memory import device_bytes
from mmjax.planner.parameters import num_parameters, parameter_arrays
from mmjax.planner.pipeline_cut import Block, cut_pipeline, equal_layers
from mmjax.planner.search import search
from mmjax.planner.stages import part_flops
from mmjax.planner.step_time import StepClock
from mmjax.planner.topology import read_cluster
from mmjax.planner.units import format_bytes, format_flops, format_seconds
from mmjax.presets.fuyu import fuyu_8b
from mmjax.presets.kimi_k3 import kimi_k3
from mmjax.presets.llava import llava_next_vicuna_7b

Rows = list[tuple[str, ...]]

# A sample: one picture, and so many tokens of text beside its features.
_TEXT_TOKENS = 512
# One tower's picture as patches and as features that the decoder reads.
_SCANNED: Mapping[str, tuple[ModelConfig, int, int]] = {
    "LLaVA-1.6 7B (5 tiles)": (llava_next_vicuna_7b(), 5 * 577, 5 * 576),
    "Qwen-VL 7B": (qwen_vl_7b(), 1024, 256),
    "Fuyu-8B (1080 x 1080)": (fuyu_8b(), 1296, 1296),
}
_BANDWIDTHS = (6.25e9, 12.5e9, 25e9, 50e9)


def three_way_scan() -> tuple[tuple[str, ...], Rows]:
    """FLOPs a token, bandwidth of the links, and alignment of the streams, over three models.

    Each GPU trains on one sample at a time; 16 of them make a step between whose ends the gradients of the model
    (2 bytes each) are summed over 32 A100. Alignment: time of the faster stream over that of the slower one.
    """
    header = ("model", "FLOPs/token, text", "FLOPs/token, picture", "alignment", *(_gigabits(b) for b in _BANDWIDTHS))
    rows: Rows = []
    gpu = read_cluster("4x8xa100").gpu
    for name, (model, patches, features) in _SCANNED.items():
        tokens = _TEXT_TOKENS + features
        text = sum(forward_flops(model, tokens).values())
        picture = vision_forward_flops(model, patches) * patches
        text_rate, vision_rate = PEER_SHARES["dense MLP"] * gpu.flops_per_second, PEER_SHARES["vision"]
        seconds = {"text": text * tokens / text_rate, "image": picture / (vision_rate * gpu.flops_per_second)}
        streams = {stream: [one * (index + 1) for index in range(16)] for stream, one in seconds.items()}
        gradients = 2.0 * num_parameters(model)
        tower = 2.0 * sum(array.size for array in parameter_arrays(model) if array.part in ("vision", "projector"))
        cells = []
        for bandwidth in _BANDWIDTHS:
            cost = golden_cost(
                [
                    Branch(
                        name=stream,
                        forward_flops=16 * 3 * seconds[stream] * text_rate,
                        flops_per_second=text_rate,
                        exchanged_bytes=2 * (31 / 32) * num_bytes,
                        bandwidth=0.8 * bandwidth,
                    )
                    for stream, num_bytes in (("text", gradients - tower), ("image", tower))
                ],
                alignment_seconds=3 * alignment_penalty(streams),
            )
            cells.append(f"{cost.total:.2f} s, {cost.slowest.exchange / cost.slowest.total:.0%} exchange")
        alignment = min(seconds.values()) / max(seconds.values())
        rows.append((name, format_flops(text), format_flops(picture / features), f"{alignment:.2f}", *cells))
    return header, rows


def communication_shares() -> tuple[tuple[str, ...], Rows]:
    """Share of a step in exchanges that nothing hides, and with it the time that a pipeline's stages wait."""
    header = ("system", "GPUs", "step", "exchanges", "and waiting", "published")
    rows: Rows = []
    for name, model, mesh, cluster, published, features in (
        ("Qwen-VL-7B, TP2 x PP4", qwen_vl_7b(), MeshConfig(tensor=2, pipe=4), "8xa100", "18 %", 1024),
        ("the same without NVLink", qwen_vl_7b(), MeshConfig(tensor=2, pipe=4), "pcie", "18 %", 1024),
        (
            "LLaVA-1.5-13B, TP4 x PP2 x DP2",
            llava_1_5_13b(),
            MeshConfig(tensor=4, pipe=2, replica=2),
            "2x8xa100",
            "29 %",
            577,
        ),
        (
            "the same without NVLink",
            llava_1_5_13b(),
            MeshConfig(tensor=4, pipe=2, replica=2),
            "pcie",
            "29 %",
            577,
        ),
    ):
        here = _without_nvlink(read_cluster("2x8xa100")) if cluster == "pcie" else read_cluster(cluster)
        data = pictures(16 * mesh.replica, 2048, features, features)
        trained = dataclasses.replace(model, parameter_dtype="float32")
        config = RunConfig(model=trained, mesh=mesh, data=data, training=TrainingConfig(accumulation=16))
        time = StepClock(config, here).step(config)
        waiting = time.communication_share + time.bubble / time.total
        rows.append(
            (
                name,
                str(mesh.num_devices),
                format_seconds(time.total),
                f"{time.communication_share:.1%}",
                f"{waiting:.1%}",
                published,
            )
        )
    return header, rows


def reduce_and_gather() -> tuple[tuple[str, ...], Rows]:
    """What a 7 B model exchanges in a step of 16 micro-batches: one sum of whole gradients at the end of it, or weights
    gathered in chunks (layers) under the computing of the chunk before, and gradients scattered the same way."""
    header = ("GPUs", "all-reduce", "chunked gathers", "of them exposed", "all-reduce / exposed")
    rows: Rows = []
    layers, weights = 32, 2.0 * 7.06e9
    for nodes in (1, 2, 4, 8):
        cluster = read_cluster(f"{nodes}x8xa100")
        group = Group(num_devices=8 * nodes, devices_per_node=8, inside=cluster.inside, between=cluster.between)
        reduced = all_reduce_seconds(weights, group)
        # A row of 4,096 tokens on each GPU: forward, backward with the layer's input gathered again.
        compute = 4096 * 2 * 7.06e9 / layers / (0.6 * cluster.gpu.flops_per_second)
        gather = all_gather_seconds(weights / layers, group)
        passes = ((1.0, 1), (2.0, 2))
        total = exposed = 0.0
        for work, exchanges in passes:
            total += layers * exchanges * gather
            exposed += gather + (layers - 1) * max(0.0, exchanges * gather - work * compute)
        ratio = f"{reduced / exposed:.2f}"
        rows.append((str(8 * nodes), *map(format_seconds, (reduced, total, exposed)), ratio))
    return header, rows


def hop_aware_exchange() -> tuple[tuple[str, ...], Rows]:
    """Use of the network cards by an all-to-all over 2 x 8 H200, ranks dealt at random, mean of ten draws.

    Use: bytes that must cross between the nodes over what all cards could carry meanwhile.
    """
    header = ("traffic", "default", "planned", "gain", "least gain", "published")
    rows: Rows = []
    cluster = read_cluster("2x8xh200")
    for kind in ("uniform", "skewed"):
        uses = []
        for seed in range(10):
            random = np.random.default_rng(seed)
            network = Network(cluster=cluster, device_of_rank=tuple(random.permutation(16).tolist()))
            traffic = np.full((16, 16), 8e6)
            if kind == "skewed":
                traffic *= random.lognormal(0, 1, (16, 16)) * random.lognormal(0, 0.5, (1, 16))
            np.fill_diagonal(traffic, 0)
            plan = plan_all_to_all(traffic, network)
            uses.append([_card_use(outcome, network) for outcome in (plan.default, plan.outcome)])
        default, planned = np.mean(uses, axis=0)
        gains = [one[1] / one[0] for one in uses]
        published = "58.2 -> 68.5 %, 1.18" if kind == "uniform" else ""
        cells = (f"{default:.1%}", f"{planned:.1%}", f"{planned / default:.2f}", f"{min(gains):.2f}")
        rows.append((kind, *cells, published))
    return header, rows


def equal_and_cut() -> tuple[tuple[str, ...], Rows]:
    """Stages of equally many layers (tower and decoder in one row) against the exact cut: slowest over mean stage, and
    a step of 16 micro-batches."""
    header = ("model", "stages", "equal: slowest / mean", "cut: slowest / mean", "step, equal", "step, cut", "gain")
    rows: Rows = []
    for name, model, data, num_stages in (
        ("Qwen-VL 7B", qwen_vl_7b(), pictures(16, 2048, 1024, 1024), 4),
        ("LLaVA-1.5 13B", llava_1_5_13b(), pictures(16, 2048, 577, 577), 2),
        ("LLaVA-1.6 7B", llava_next_vicuna_7b(), pictures(16, 4096, 2885, 2885), 8),
        ("Kimi-K3", kimi_k3(), pictures(16, 8192, 4096, 4096), 8),
    ):
        parts = part_flops(RunConfig(model=model, data=data))
        rate = 0.5 * read_cluster("8xa100").gpu.flops_per_second
        tower = [parts.tower / model.vision.num_layers] * model.vision.num_layers
        decoder = [*parts.layers[:-1], parts.layers[-1] + parts.head]
        blocks = [Block(name=str(index), seconds=3 * work / rate) for index, work in enumerate([*tower, *decoder])]
        equal, cut = equal_layers(blocks, num_stages), cut_pipeline(blocks, num_stages)
        mean = sum(block.seconds for block in blocks) / num_stages
        steps = [one.step_seconds(16) for one in (equal, cut)]
        rows.append(
            (
                f"{name}, {len(tower)} + {len(layer_kinds(model))} layers",
                str(num_stages),
                f"{equal.slowest_seconds / mean:.2f}",
                f"{cut.slowest_seconds / mean:.2f}",
                *map(format_seconds, steps),
                f"{steps[0] / steps[1]:.2f}",
            )
        )
    return header, rows


def data_parallel_and_plan() -> tuple[tuple[str, ...], Rows]:
    """Copies of the whole model on 32 A100 against the best plan, LLaVA-1.6 7B trained in full.

    Utilisation of a branch: its FLOPs over the peak of the share of GPUs' time that the step gives it, exchanges and
    waiting shared out by its computing.
    """
    header = ("plan", "fits", "step", "exchanges", "MFU", "vision", "text", "published vision, text")
    cluster = read_cluster("4x8xa100")
    model = dataclasses.replace(llava_next_vicuna_7b(), parameter_dtype="float32")
    config = RunConfig(model=model, data=pictures(64, 4096, 2885, 2885), mesh=MeshConfig(replica=32))
    config = dataclasses.replace(config, training=TrainingConfig(accumulation=2))
    best = search(config, cluster).plans[0]
    rows: Rows = []
    for name, run, time, published in (
        ("data parallel", config, StepClock(config, cluster).step(config), "12.4 %, 89.2 %"),
        (best.name, best.config, best.time, "31.7 %, 94.5 %"),
    ):
        clock = StepClock(run, cluster)
        peak = cluster.num_devices * cluster.gpu.flops_per_second
        data = run.data
        vision = clock.computing.vision_training * data.rows * data.row_patches
        text = clock.step_flops(run) - vision
        # What a device computes of each, repeated work included.
        compute = time.forward + time.backward + time.recompute
        tower = _tower_seconds(run, clock)
        share = tower / compute
        rows.append(
            (
                name,
                format_bytes(device_bytes(run).total),
                format_seconds(time.total),
                f"{time.communication_share:.1%}",
                f"{(vision + text) / peak / time.total:.1%}",
                f"{vision / peak / (time.total * share):.1%}",
                f"{text / peak / (time.total * (1 - share)):.1%}",
                published,
            )
        )
    return header, rows


def _tower_seconds(run: RunConfig, clock: StepClock) -> float:
    """Of a device: forward, backward and once more, whole on every device of tensor and context."""
    mesh, data = run.mesh, run.data
    patches = data.rows * data.row_patches / (mesh.num_row_shards * mesh.pipe)
    flops = clock.computing.vision_training + clock.computing.vision_forward
    return patches * flops / (PEER_SHARES["vision"] * clock.cluster.gpu.flops_per_second)


def _card_use(outcome: Outcome, network: Network) -> float:
    cards = network.cluster.num_devices * network.cluster.between.bandwidth
    return outcome.between_bytes / cards / outcome.seconds


def _without_nvlink(cluster: Cluster) -> Cluster:
    link = Link(bandwidth=cluster.gpu.pcie_bandwidth / 2, latency_seconds=cluster.inside.latency_seconds)
    return dataclasses.replace(cluster, inside=link)


def _gigabits(bandwidth: float) -> str:
    return f"{bandwidth * 8 / 1e9:.0f} Gbit/s"


EXPERIMENTS = {
    "FLOPs, bandwidth and alignment": three_way_scan,
    "share of communication": communication_shares,
    "all-reduce and chunked all-gather": reduce_and_gather,
    "hop-aware and default all-to-all": hop_aware_exchange,
    "equal layers and the cut": equal_and_cut,
    "data parallelism and the plan, 32 A100": data_parallel_and_plan,
}


def draw(header: Sequence[str], rows: Rows, title: str, path: Path) -> None:
    """Bars of every column whose cells begin with numbers."""
    from matplotlib.figure import Figure

    def number(cell: str) -> float | None:
        try:
            return float(cell.split()[0].rstrip("%,s"))
        except (ValueError, IndexError):
            return None

    columns = [index for index in range(1, len(header)) if all(number(row[index]) is not None for row in rows)]
    figure = Figure(figsize=(3 * max(1, len(columns)), 3.5), layout="constrained")
    for place, index in enumerate(columns):
        plot = figure.add_subplot(1, len(columns), place + 1)
        plot.bar(range(len(rows)), [number(row[index]) or 0.0 for row in rows])
        plot.set(title=header[index], xticks=range(len(rows)))
        plot.set_xticklabels([row[0] for row in rows], rotation=60, ha="right", fontsize=6)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every table; with --output also text and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="")
    output = parser.parse_args(arguments).output
    console = Console(width=160)
    for title, experiment in EXPERIMENTS.items():
        header, rows = experiment()
        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        if output:
            folder = Path(output)
            folder.mkdir(parents=True, exist_ok=True)
            name = title.replace(" ", "_").replace(",", "")
            lines = [" | ".join(row) for row in (header, *rows)]
            (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
            draw(header, rows, title, folder / f"{name}.png")


if __name__ == "__main__":
    main()
