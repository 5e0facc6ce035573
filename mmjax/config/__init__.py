"""Every setting of a run, its faults, and its text forms (YAML, `--mesh`). No JAX."""

from mmjax.config import saved
from mmjax.config.faults import UNBUILT_AXES, ConfigurationFaults, Fault, check, mesh_split_faults
from mmjax.config.mesh_text import MESH_AXIS_PURPOSES, describe_mesh, parse_mesh
from mmjax.config.settings import (
    ActivationConfig,
    CheckpointConfig,
    DataConfig,
    Float,
    FullAttentionConfig,
    IndexerConfig,
    LayerKind,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RouterConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
    layer_kinds,
    resolve_mesh,
)
from mmjax.config.yaml_text import flatten, from_yaml, to_yaml

__all__ = [
    "MESH_AXIS_PURPOSES",
    "UNBUILT_AXES",
    "ActivationConfig",
    "CheckpointConfig",
    "ConfigurationFaults",
    "DataConfig",
    "Fault",
    "Float",
    "FullAttentionConfig",
    "IndexerConfig",
    "LayerKind",
    "LinearAttentionConfig",
    "MeshConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "RouterConfig",
    "RunConfig",
    "TrainingConfig",
    "VisionConfig",
    "check",
    "describe_mesh",
    "flatten",
    "from_yaml",
    "layer_kinds",
    "mesh_split_faults",
    "parse_mesh",
    "resolve_mesh",
    "saved",
    "to_yaml",
]
