import dataclasses
import json

import pytest

from mmjax import train
from mmjax.config import (
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.errors import ConfigurationError
from mmjax.parallel import described
from mmjax.parallel.described import described_mesh
from mmjax.planner.topology import read_cluster
from mmjax.training import compiled_step
from mmjax.training.compiled_step import compile_step, group_of


def small_run(**changes) -> RunConfig:
    """Adapters on a model with packed experts, on 16 devices of two nodes."""
    model = ModelConfig(
        num_layers=2,
        full_attention_layers=(0, 1),
        residual="plain",
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
        vision=VisionConfig(num_layers=0),
        moe=MoeConfig(expert_storage="mxfp4", expert_width=64),
    )
    lora = LoraConfig(rank=4, experts="shared_down", targets=(r".*\.mixer\.(query|output)", r".*\.mlp\.(gate|down)"))
    run = RunConfig(model=model, lora=lora, mesh=MeshConfig(fsdp=2, expert=8), data=DataConfig(rows=16, row_tokens=128))
    return dataclasses.replace(run, **changes)


def test_without_the_plug_in_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(described, "_PLUGINS", ("no_such_plug_in",))
    with pytest.raises(ConfigurationError, match=r"-e .\.\[deviceless\]"):
        described_mesh(MeshConfig(fsdp=8), read_cluster("8xh200"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--cluster", "16x8xh201"], "did you mean"),
        (["--dry-run", "--cluster", "16x8"], "16x8xh200"),
        (["--dry-run", "--cluster", "1x2xh200", "--mesh", "fsdp=4"], "describe more nodes"),
        (["--dry-run", "--json", "numbers.json"], "--cluster"),
        (["--cluster", "16x8xh200"], "add --dry-run"),
    ],
)
def test_a_cluster_that_cannot_be_meant_is_one_clear_error(arguments, message, capsys):
    assert train.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("decoder.segments.0.layers.0.mlp.gate", "shared experts and dense MLPs"),
        ("decoder.segments.0.layers.0.mlp.gate.down", "shared experts and dense MLPs"),
        ("decoder.segments.1.layers.0.mlp.gate_codes", "routed experts"),
        ("decoder.segments.1.layers.0.mlp.down.up", "routed experts"),
        ("decoder.segments.1.layers.0.mlp.shared.gate", "shared experts and dense MLPs"),
        ("decoder.segments.1.layers.0.mlp.latent_up", "routers and latent projections"),
        ("decoder.segments.1.layers.0.mixer.query.down", "attention"),
        ("decoder.embedding", "tables"),
        ("vision.layers.mlp.up", "towers"),
        ("decoder.norm", "norms and others"),
    ],
)
def test_arrays_are_grouped_by_what_they_are_for(path, group):
    assert group_of(path, {"decoder.segments.1.layers.0.mlp"}) == group


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_step_compiled_without_a_gpu_says_where_memory_goes_and_what_is_exchanged(tmp_path):
    config = small_run()
    text_file = tmp_path / "program.txt"
    compiled = compile_step(config, read_cluster("2x8xh200"), text_file=text_file)
    memory = compiled.device_memory
    # Every argument is accounted for, but for a few that the step does not read.
    assert 0.9 < memory["arguments"] / sum(compiled.at_rest.values()) <= 1
    # The state is changed in place.
    assert memory["aliased"] > 0.9 * memory["outputs"]
    kinds = {(exchange.kind, exchange.mesh_axes) for exchange in compiled.exchanges}
    assert ("all-gather", ("fsdp", "expert")) in kinds and ("all-to-all", ("expert",)) in kinds
    assert compiled.flops > 0 and 0 <= compiled.hidden_share <= 1
    # Experts are gathered packed, and nothing frozen has moments.
    text = text_file.read_text()
    gathered = [line for line in text.splitlines() if " all-gather" in line and "u8[" in line]
    assert gathered
    adapters = sum(size for name, size in compiled.at_rest.items() if name.startswith("adapters"))
    assert compiled.at_rest["optimizer"] == pytest.approx(2 * adapters, rel=0.01)
    # As JSON it is the same.
    compiled.write(tmp_path / "numbers.json")
    assert json.loads((tmp_path / "numbers.json").read_text())["device_memory"] == memory


@pytest.mark.deviceless
def test_compiled_text_is_described_alike_for_each_kind_of_gpu_that_is_known():
    for name in ("a100", "h100", "h200", "b200"):
        mesh = described_mesh(MeshConfig(fsdp=2, expert=8), read_cluster(f"2x8x{name}"))
        assert mesh.devices.size == 16 and {device.process_index for device in mesh.devices.flat} == {0, 1}
    with pytest.raises(ConfigurationError, match="rtx-4090"):
        described_mesh(MeshConfig(fsdp=2), read_cluster("2xrtx-4090"))


def test_the_batch_is_described_as_the_loader_makes_it():
    from mmjax.parallel.mesh import make_mesh

    batch = compiled_step.abstract_batch(small_run(mesh=MeshConfig()), make_mesh(MeshConfig()))
    assert batch.tokens.shape == (16, 128) and batch.patches.shape[1] == 0


@pytest.mark.slow
@pytest.mark.deviceless
def test_what_is_kept_on_the_host_leaves_the_device():
    model = ModelConfig(
        width=1024,
        num_layers=8,
        full_attention_layers=tuple(range(8)),
        full_attention_kind="grouped",
        residual="plain",
        moe=MoeConfig(num_dense_layers=8, dense_width=4096),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )

    def memory(**changes):
        config = RunConfig(
            model=dataclasses.replace(model, **changes),
            mesh=MeshConfig(fsdp=2),
            data=DataConfig(rows=16, row_tokens=2048),
        )
        compiled = compile_step(config, read_cluster("1x2xh200"))
        return compiled.device_memory["total"], sum(compiled.host_memory.values())

    (kept, none), (moved, on_host) = memory(remat_keep=("projections",)), memory(remat_offload=("projections",))
    assert none == 0 and on_host > 0.2 * kept
    assert kept - moved == pytest.approx(on_host, rel=0.1)


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("transfer", "fsdp", "is_hidden"), [("hidden", 1, True), ("direct", 1, False), ("hidden", 2, True)]
)
def test_what_a_pipelines_stages_hand_on_travels_while_they_compute(transfer, fsdp, is_hidden):
    """Also where they gather weights meanwhile, as one program of all stages, and hand on sums of residual blocks."""
    stages = (1, 3, 2, 2) if fsdp > 1 else (2, 2)
    model = ModelConfig(
        width=1024,
        num_layers=sum(stages),
        full_attention_layers=tuple(range(sum(stages))),
        full_attention_kind="grouped",
        residual="plain" if fsdp == 1 else "attention",
        residual_block_layers=2,
        moe=MoeConfig(num_dense_layers=sum(stages), dense_width=4096),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
        pipeline_stages=stages,
        layer_loops="whole" if fsdp > 1 else "blocks",
    )
    config = RunConfig(
        model=model,
        mesh=MeshConfig(pipe=len(stages), fsdp=fsdp),
        data=DataConfig(rows=4 * fsdp, row_tokens=2048),
        training=TrainingConfig(accumulation=4, pipeline_transfer=transfer),
    )
    compiled = compile_step(config, read_cluster("1x8xh200"))
    (sent,) = [exchange for exchange in compiled.exchanges if exchange.kind == "collective-permute"]
    assert sent.mesh_axes == ("pipe",)
    assert (sent.hidden_bytes > 0.9 * sent.num_bytes) == is_hidden
    if is_hidden:
        # In each tick in one direction, over three borders: the running sum, and one to three of residual blocks.
        num_ticks, crossing = (20, 2 + 3 + 4) if fsdp > 1 else (12, 1)
        assert sent.num_bytes == pytest.approx(num_ticks * 2048 * 1024 * 2 * crossing / len(stages))
