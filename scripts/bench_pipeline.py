"""Tower and embedding on a pipeline's first stage against all stages: compiled memory, and idle compute as counted.

python scripts/bench_pipeline.py --mesh pipe=8 --mesh pipe=4,tensor=2

Compiles the training step of an experiment for each mesh and both values of training.pipeline_edges, without a GPU
(extra `deviceless`) and without any weight; about a minute of one core each.
"""

import argparse
import dataclasses
import os

# The plug-in that compiles for GPUs looks for a driver otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from mmjax.config import RunConfig, check, parse_mesh
from mmjax.parallel.pipeline_work import count_work
from mmjax.planner.stages import with_stages
from mmjax.planner.topology import read_cluster
from mmjax.planner.units import format_bytes, format_flops
from mmjax.train import find_experiment
from mmjax.training.compiled_step import compile_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="llava15_13b_pipeline")
    parser.add_argument("--cluster", default="1x8xh200")
    parser.add_argument("--mesh", action="append", help="give it again for another one; default: the experiment's")
    options = parser.parse_args()
    start = find_experiment(options.experiment)
    meshes = [parse_mesh(mesh) for mesh in options.mesh or []] or [start.mesh]
    print("| mesh | pipeline_edges | stages | ticks | device memory | temporaries | span | idle compute | share |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mesh in meshes:
        for edges in ("first_stage", "data_parallel"):
            training = dataclasses.replace(start.training, pipeline_edges=edges)
            print(line(with_stages(dataclasses.replace(start, mesh=mesh, training=training)), options.cluster))


def line(config: RunConfig, cluster: str) -> str:
    if faults := check(config):
        raise SystemExit("\n".join(str(fault) for fault in faults))
    memory, work = compile_step(config, read_cluster(cluster)).device_memory, count_work(config)
    mesh = ",".join(f"{axis}={size}" for axis, size in config.mesh.sizes.items() if size > 1)
    cells = (
        mesh,
        config.training.pipeline_edges,
        " ".join(map(str, config.model.pipeline_stages)),
        work.num_ticks,
        format_bytes(memory["total"]),
        format_bytes(memory["temporaries"]),
        format_flops(work.span),
        format_flops(work.idle),
        f"{work.idle_share:.1%}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
