"""Settings: every fault found at once, the mesh's text, YAML there and back, and the settings kept beside a run."""

import dataclasses
import math

import pytest

from mmjax.config import (
    AudioConfig,
    ConfigurationFaults,
    DataConfig,
    FullAttentionConfig,
    GroupedAttentionConfig,
    LinearAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RotaryConfig,
    RouterConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
    check,
    describe_mesh,
    flatten,
    from_yaml,
    parse_mesh,
    resolve_mesh,
    saved,
    to_yaml,
)
from mmjax.config.faults import BYTE_TOKENIZER_SIZE, SPLIT_OVER, mesh_split_faults
from mmjax.errors import CheckpointError, ConfigurationError

REPLACE = dataclasses.replace


def with_model(**changes) -> RunConfig:
    return RunConfig(model=REPLACE(ModelConfig(), **changes))


def with_moe(**changes) -> RunConfig:
    return with_model(moe=REPLACE(MoeConfig(), **changes))


FAULTY = {
    "data.rows": RunConfig(mesh=MeshConfig(fsdp=2), training=TrainingConfig(accumulation=3)),
    "mesh": RunConfig(mesh=MeshConfig(fsdp=-1, expert=-1)),
    "mesh.pipe": RunConfig(mesh=MeshConfig(pipe=10)),
    "model.pipeline_stages": REPLACE(with_model(pipeline_stages=(5, 3)), mesh=MeshConfig(pipe=2)),
    "model.pipeline_chunks": RunConfig(training=TrainingConfig(pipeline_schedule="interleaved")),
    "training.accumulation": REPLACE(
        with_model(pipeline_chunks=2),
        mesh=MeshConfig(pipe=2),
        training=TrainingConfig(pipeline_schedule="interleaved", accumulation=2),
    ),
    "mesh.tensor": RunConfig(mesh=MeshConfig(tensor=0)),
    "model.width": with_model(width=-64),
    "model.num_layers": with_model(num_layers="9"),
    "model.full_attention_layers": with_model(full_attention_layers=(3, 9)),
    "model.residual": with_model(residual="attentoin"),
    "model.residual_block_layers": with_model(residual_block_layers=0),
    "model.norm_epsilon": with_model(norm_epsilon=float("nan")),
    "model.vocabulary_size": with_model(vocabulary_size=100),
    "model.linear_attention.chunk_tokens": with_model(linear_attention=LinearAttentionConfig(chunk_tokens=0)),
    "model.linear_attention.decay_lower_bound": with_model(
        linear_attention=LinearAttentionConfig(decay_lower_bound=0.0)
    ),
    "model.full_attention.query_chunk_tokens": with_model(full_attention=FullAttentionConfig(query_chunk_tokens=-1)),
    "model.moe.experts_per_token": with_moe(experts_per_token=17),
    "model.moe.resident_experts": with_moe(num_experts=16, resident_experts=3),
    "model.moe.router.num_groups": with_moe(router=RouterConfig(num_groups=3)),
    "model.moe.router.top_groups": with_moe(router=RouterConfig(num_groups=2, top_groups=3)),
    "model.moe.num_dense_layers": with_moe(num_dense_layers=10),
    "model.moe.capacity_factor": with_moe(capacity_factor=float("inf")),
    "model.moe.exchange_chunks": with_moe(transport="ring", exchange_chunks=2),
    "model.moe.transport": with_moe(transport="rings"),
    "model.moe.node_devices": with_moe(node_devices=0),
    "model.moe.router.balance_coefficient": with_moe(router=RouterConfig(balance_coefficient=-0.1)),
    "model.vision.head_width": with_model(vision=VisionConfig(head_width=6)),
    "model.vision.channels": with_model(vision=VisionConfig(channels=4)),
    "model.vision.feature_depths": with_model(vision=VisionConfig(kind="clip", feature_depths=(3,))),
    "model.vision.tilings": REPLACE(
        with_model(vision=VisionConfig(kind="clip", feature_depths=(1,), newline="learned", tilings=(1,))),
        data=DataConfig(row_tokens=300),
    ),
    "model.vision.deep_layers": with_model(vision=VisionConfig(kind="qwen3_vl", deep_layers=(1, 0))),
    "model.grouped_attention.rotary.sections": with_model(
        full_attention_kind="grouped",
        grouped_attention=GroupedAttentionConfig(rotary=RotaryConfig(width=16, sections=(4, 2, 2))),
    ),
    "model.audio.clip_frames": with_model(audio=AudioConfig(num_layers=1, clip_frames=14)),
    "model.vision.num_layers": with_model(vision=VisionConfig(num_layers=0)),
    "data.row_patches": RunConfig(data=DataConfig(row_patches=64)),
    "data.image_max_patches": RunConfig(data=DataConfig(image_max_patches=30)),
    "data.row_tokens": RunConfig(data=DataConfig(row_tokens=64)),
    "optimizer.warmup_steps": RunConfig(optimizer=OptimizerConfig(warmup_steps=101)),
    "optimizer.beta2": RunConfig(optimizer=OptimizerConfig(beta2=1.0)),
    "optimizer.learning_rate": RunConfig(optimizer=OptimizerConfig(learning_rate=True)),
    "training.steps": RunConfig(training=TrainingConfig(steps=1.5)),
    "seed": RunConfig(seed=2**32),
}


@pytest.mark.parametrize("path", FAULTY)
def test_a_fault_is_found_alone_and_by_its_name(path: str):
    faults = check(FAULTY[path])
    assert [fault.path for fault in faults] == [path]
    assert all(fault.found and fault.remedy for fault in faults)


def test_the_default_settings_have_no_fault():
    assert check(RunConfig()) == []


def test_faults_of_all_parts_are_reported_at_once():
    config = REPLACE(
        with_moe(experts_per_token=99),
        mesh=MeshConfig(fsdp=3, tensor=5, pipe=10),
        optimizer=OptimizerConfig(warmup_steps=1000),
    )
    paths = {fault.path for fault in check(config)}
    assert paths >= {
        "mesh.pipe",
        "model.moe.experts_per_token",
        "data.rows",
        "model.linear_attention.num_heads",
        "model.full_attention.num_heads",
        "model.moe.dense_width",
        "optimizer.warmup_steps",
    }
    wrong_values = with_moe(num_experts=-1, capacity_factor="2")
    assert [fault.path for fault in check(wrong_values)] == ["model.moe.num_experts", "model.moe.capacity_factor"]


def test_a_fault_names_the_numbers_and_a_size_that_works():
    (fault,) = mesh_split_faults(REPLACE(with_moe(num_experts=12), mesh=MeshConfig(expert=8)))
    assert fault.found == "12 (experts) over expert=8"
    assert "multiple of 8, e.g. 16" in fault.remedy


@pytest.mark.parametrize(("row_tokens", "enough"), [(350, "352"), (4, "48")])
def test_rows_that_a_context_axis_cannot_cut_are_refused(row_tokens, enough):
    """8 devices cut rows into 16 chunks, of at least the three tokens that a convolution of width 4 looks back to."""
    data = DataConfig(row_tokens=row_tokens, row_patches=8, image_max_patches=8)
    (fault,) = check(RunConfig(data=data, mesh=MeshConfig(context=8)))
    assert fault.path == "data.row_tokens" and f"e.g. {enough}" in fault.remedy
    assert not check(RunConfig(data=REPLACE(data, row_tokens=int(enough)), mesh=MeshConfig(context=8)))


def test_a_misspelt_choice_gets_the_nearest_one():
    assert "'quantile'" in check(with_moe(router=RouterConfig(balancing="quantil")))[0].remedy


@pytest.mark.parametrize("balancing", ["quantile", "sign"])
def test_quantile_balancing_needs_one_expert_more_than_a_token_takes(balancing: str):
    config = with_moe(experts_per_token=16, router=RouterConfig(balancing=balancing))
    assert bool(check(config)) == (balancing == "quantile")
    grouped = with_moe(experts_per_token=4, router=RouterConfig(balancing=balancing, num_groups=4, top_groups=1))
    assert bool(check(grouped)) == (balancing == "quantile")


def test_the_byte_tokenizer_fits_the_smallest_vocabulary_that_passes():
    from mmjax.data.tokenizer import ByteTokenizer

    assert ByteTokenizer.vocabulary_size == BYTE_TOKENIZER_SIZE


def test_split_axes_are_those_of_the_sharding_table():
    from mmjax.parallel.sharding import RULES

    assert {**RULES, **SPLIT_OVER} == RULES
    assert RULES.keys() - SPLIT_OVER.keys() == {"batch", "position", "stage"}


@pytest.mark.parametrize("preset", ["small", "kimi_k3_tiny", "kimi_linear"])
def test_a_mesh_has_a_split_fault_exactly_when_some_parameter_does_not_divide(preset: str):
    from mmjax.models.multimodal import define
    from mmjax.parallel.sharding import rests_on
    from mmjax.presets.kimi_k3 import kimi_k3_tiny
    from mmjax.presets.kimi_linear import kimi_linear_48b

    models = {"small": ModelConfig, "kimi_k3_tiny": kimi_k3_tiny, "kimi_linear": kimi_linear_48b}
    model = models[preset]()
    split = {
        (axis, size)
        for variable in define(model).parameters.values()
        for axis, size in zip(
            variable.get_metadata()["array_axes"][::-1], variable.get_value().shape[::-1], strict=False
        )
        if axis
    }
    meshes = [MeshConfig(**{axis: size}) for axis in ("fsdp", "expert", "tensor") for size in (2, 3, 4, 8, 16, 24, 32)]
    meshes += [MeshConfig(fsdp=4, expert=4), MeshConfig(fsdp=4, tensor=2), MeshConfig(fsdp=2, expert=2, tensor=3)]
    for mesh in meshes:
        does_divide = all(
            size % math.prod(mesh.sizes[name] for name in rests_on(axis, size, mesh.sizes)) == 0 for axis, size in split
        )
        found = list(mesh_split_faults(RunConfig(mesh=mesh, model=model)))
        assert bool(found) != does_divide, (mesh, found)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("4x2x16", MeshConfig(pipe=4, tensor=2, expert=16)),
        ("1x2x-1", MeshConfig(tensor=2, expert=-1)),
        ("fsdp=2,expert=64", MeshConfig(fsdp=2, expert=64)),
        (" replica=3 , context = 2", MeshConfig(replica=3, context=2)),
    ],
)
def test_mesh_text_is_read(text: str, mesh: MeshConfig):
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("4x2", "pipe x tensor x expert"),
        ("4x2x16x1", "pipe, replica, fsdp, context, expert, tensor"),
        ("", "such as 4x2x16"),
        ("fsp=2", "did you mean 'fsdp'"),
        ("exprt=2", "did you mean 'expert'"),
        ("zz=2", "out of pipe, replica, fsdp, context, expert, tensor"),
        ("fsdp=0", "mend fsdp=0"),
        ("fsdp=2,fsdp=4", "each axis once"),
        ("fsdp=-1,expert=-1", "at most one axis of -1"),
        ("fsdp=2.5", "mend 'fsdp=2.5'"),
        ("fsdp=99999999999999", "mend"),
    ],
)
def test_mesh_text_that_cannot_be_read_names_the_axes(text: str, part: str):
    with pytest.raises(ConfigurationError) as error:
        parse_mesh(text)
    assert part in str(error.value)


def test_an_open_axis_takes_the_devices_that_are_left():
    assert resolve_mesh(parse_mesh("1x2x-1"), 32) == MeshConfig(tensor=2, expert=16)
    assert describe_mesh(MeshConfig(fsdp=2, tensor=4)) == "fsdp=2 tensor=4"
    assert describe_mesh(MeshConfig()) == "one device"


def test_yaml_there_and_back_is_exact():
    config = RunConfig(
        run_dir="läuft/no: 1",
        model=ModelConfig(
            full_attention_layers=(),
            norm_epsilon=1e-300,
            initializer_range=0.1 + 0.2,
            full_attention=FullAttentionConfig(),
        ),
        data=DataConfig(source="no", tokenizer="1e-4", media_root="", end_token="\n'\"#"),
        optimizer=OptimizerConfig(learning_rate=1),
    )
    again = from_yaml(to_yaml(config), "config.yaml")
    assert again == config
    assert flatten(again) == flatten(config)


def test_yaml_values_are_read_by_the_type_of_the_setting():
    config = from_yaml("optimizer: {learning_rate: 1e-4}\ndata: {source: no}\nseed: 7\n", "run.yaml")
    assert config == RunConfig(
        seed=7, optimizer=OptimizerConfig(learning_rate=1e-4), data=REPLACE(DataConfig(), source="no")
    )
    assert from_yaml("", "run.yaml") == RunConfig()


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("seed: 1\nmodel:\n  moe:\n    num_expert: 4", "model.moe.num_expert", "line 4"),
        ("model: {moe: {num_expert: 4}}", "model.moe.num_expert", "did you mean 'num_experts'?"),
        ("auto_map: x", "auto_map", "known here: run_dir"),
        ("seed: 1\nseed: 2", "seed", "line 2: given a second time"),
        ("seed: '1'", "seed", "whole number"),
        ("seed: 1.0", "seed", "whole number"),
        ("seed: " + "9" * 5000, "seed", "whole number"),
        ("seed: null", "seed", "single value"),
        ("seed: [1]", "seed", "single value"),
        ("seed: !!python/object/apply:os.getcwd []", "seed", "tag"),
        ("checkpoint: {keep_best: yes}", "checkpoint.keep_best", "true or false"),
        ("optimizer: {learning_rate: '1e-4'}", "optimizer.learning_rate", "finite number"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate", "finite number"),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate", "finite number"),
        ("optimizer: {learning_rate: 1e400}", "optimizer.learning_rate", "finite number"),
        ("optimizer: {name: muno}", "optimizer.name", "did you mean 'muon'?"),
        ("model: {full_attention_layers: 3}", "model.full_attention_layers", "a list"),
        ("model: {full_attention_layers: [3, x]}", "model.full_attention_layers[1]", "whole number"),
        ("model: 3", "model", "name: value"),
        ("a: &a [1]\nmodel: *a", "model", "name: value"),
        ("- 1", "(whole file)", "name: value"),
    ],
)
def test_a_bad_yaml_value_is_named_with_its_line(text: str, path: str, part: str):
    with pytest.raises(ConfigurationFaults) as error:
        from_yaml(text, "run.yaml")
    fault = next(fault for fault in error.value.faults if fault.path == path)
    assert "line " in fault.found
    assert part in fault.found + fault.remedy


@pytest.mark.parametrize(
    "text", ["seed: [1", "a: b: c", "--- 1\n--- 2", "seed: \t1\n\tx", "[" * 100_000, "seed: 1\n" * 200_000, "seed: *x"]
)
def test_text_that_is_not_yaml_is_one_message_with_the_file(text: str):
    with pytest.raises(ConfigurationError, match=r"run\.yaml") as error:
        from_yaml(text, "run.yaml")
    assert len(str(error.value)) < 1000


def test_all_faults_of_a_yaml_file_are_reported_at_once():
    with pytest.raises(ConfigurationFaults) as error:
        from_yaml("sed: 1\nmesh: {fsdp: x}\ntraining: {steps: 1.5}", "run.yaml")
    assert [fault.path for fault in error.value.faults] == ["sed", "mesh.fsdp", "training.steps"]


@pytest.fixture
def started(tmp_path) -> RunConfig:
    """A run that has trained: its folder holds more than its settings."""
    config = RunConfig(run_dir=str(tmp_path / "run"))
    saved.save(config)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    return config


def test_a_run_folder_takes_the_same_run_and_its_free_settings(started: RunConfig):
    saved.check_same_run(started)
    longer = REPLACE(started, mesh=MeshConfig(fsdp=2), training=TrainingConfig(steps=900, log_every_steps=5))
    data = DataConfig(max_bad_samples=500, max_bad_share=0.5, lost_source="wait", lost_source_wait_seconds=5)
    longer = REPLACE(longer, data=data)
    saved.check_same_run(longer)
    assert saved.load(saved.save(longer)) == longer


def test_a_run_folder_refuses_a_different_run(started: RunConfig):
    other = REPLACE(started, seed=5, optimizer=OptimizerConfig(learning_rate=0.5))
    with pytest.raises(ConfigurationFaults, match="different run") as error:
        saved.check_same_run(other)
    assert [fault.path for fault in error.value.faults] == ["seed", "optimizer.learning_rate"]
    assert "5; the run was started with 0" in error.value.faults[0].found


def test_a_folder_with_nothing_but_settings_is_taken_over(tmp_path):
    config = RunConfig(run_dir=str(tmp_path / "run"))
    saved.save(config)
    saved.check_same_run(REPLACE(config, seed=5))


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"absent\.yaml: found No such file"):
        saved.load(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        saved.load(tmp_path / "binary.yaml")
    with pytest.raises(CheckpointError, match="Not a directory"):
        saved.save(RunConfig(run_dir=str(tmp_path / "binary.yaml" / "run")))


def test_adapter_settings_that_do_not_fit_are_faults():
    def paths(config: RunConfig) -> list[str]:
        return [fault.path for fault in check(config)]

    packed = MoeConfig(expert_storage="mxfp4", expert_width=64)
    lora = LoraConfig(rank=4, targets=("q_proj", r".*experts.*"))
    config = with_moe(expert_storage="mxfp4", expert_width=64)
    assert paths(config) == ["model.moe.expert_storage"]
    assert paths(REPLACE(config, lora=lora)) == []
    assert paths(REPLACE(config, lora=lora, mesh=MeshConfig(tensor=4))) == ["model.moe.expert_width"]
    assert paths(REPLACE(config, lora=lora, mesh=MeshConfig(fsdp=4))) == []
    assert paths(REPLACE(with_moe(**vars(packed) | {"latent_width": 48}), lora=lora)) == ["model.moe.latent_width"]
    assert paths(RunConfig(lora=LoraConfig(rank=4, alpha=0.0))) == ["lora.alpha"]
    assert paths(RunConfig(lora=LoraConfig(rank=-1))) == ["lora.rank"]
    assert paths(RunConfig(lora=LoraConfig(rank=4, targets=()))) == ["lora.targets"]
    assert paths(RunConfig(lora=LoraConfig(rank=4, targets=("",)))) == ["lora.targets"]
    # A frozen model may be in bfloat16, one that is trained may not.
    narrow = with_model(parameter_dtype="bfloat16")
    assert paths(narrow) == ["model.parameter_dtype"]
    assert paths(REPLACE(narrow, lora=lora)) == []
    assert from_yaml(to_yaml(REPLACE(narrow, lora=lora)), "x.yaml").lora == lora
