"""Loss and gradients of a mesh against one GPU, in float32 and bfloat16: every part of Kimi K3, all of it trained."""

import dataclasses
from typing import Any

import jax
import numpy as np
from bench_train import draw_batch
from multi_benchmarks import gradients, shapes
from multi_benchmarks.session import Session

from mmjax.config import (
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
    parse_mesh,
)
from mmjax.data.batch import Batch
from mmjax.models.layout import Relayout, without_pipeline
from mmjax.parallel.mesh import make_mesh
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.step import abstract_state, make_value_and_gradient, place_arrays, place_batch

DTYPES = ("float32", "bfloat16")


def run(session: Session, name: str, *, mesh: str, changes: dict[str, Any]) -> None:
    """Without a mesh the gradients of one GPU are kept; with one they are compared with those."""
    config = run_config(parse_mesh(mesh) if mesh else MeshConfig(), is_tiny=session.is_tiny)
    config = shapes.settled(shapes.changed(config, **changes))
    # CPUs lack the products of bfloat16 that split positions need.
    dtypes = DTYPES[:1] if session.is_tiny and config.mesh.context > 1 else DTYPES
    programs = {dtype: compiled(config, dtype) for dtype in dtypes}
    plain = without_pipeline(config.model)
    with session.turn():
        found = {dtype: step(config, dtype, program) for dtype, program in programs.items()}
    if not mesh:
        for dtype, (loss, arrays) in found.items():
            gradients.save(session.shared / f"{dtype}.npz", arrays | {"loss": loss})
            session.report(dtype=dtype, loss=float(loss))
        return
    relayout, paths = Relayout(plain, config.model), found["float32"][1]
    references, losses = {}, {}
    for dtype in DTYPES:
        arrays = gradients.load(session.shared / f"{dtype}.npz")
        losses[dtype] = float(arrays.pop("loss"))
        references[dtype] = relayout.apply(arrays, paths, np)
    # One GPU's own rounding says how far another order of sums may lead.
    usual = gradients.distances(references["bfloat16"], references["float32"])
    for dtype, (loss, arrays) in found.items():
        if dtype == "bfloat16":
            values = gradients.beside(arrays, references[dtype], usual)
        else:
            values = dataclasses.asdict(gradients.difference(arrays, references[dtype]))
        session.report(dtype=dtype, loss=float(loss), loss_difference=abs(float(loss) / losses[dtype] - 1), **values)


def run_config(mesh: MeshConfig, *, is_tiny: bool) -> RunConfig:
    """Widths that the GPU's kernels take, or tiny ones."""
    head = 8 if is_tiny else 128
    width = 32 if is_tiny else 1024
    model = ModelConfig(
        width=width,
        num_layers=2 if is_tiny else 4,
        vocabulary_size=64 if is_tiny else 2048,
        full_attention_layers=(1,) if is_tiny else (1, 3),
        residual_block_layers=2,
        linear_attention=LinearAttentionConfig(
            num_heads=2 if is_tiny else 4,
            key_width=head,
            value_width=head,
            decay_rank=head,
            chunk_tokens=16 if is_tiny else 64,
        ),
        full_attention=FullAttentionConfig(
            num_heads=2 if is_tiny else 4,
            query_rank=16 if is_tiny else 256,
            latent_width=8 if is_tiny else 512,
            nope_width=head,
            shared_key_width=head // 2,
            value_width=head,
            query_chunk_tokens=16 if is_tiny else 512,
        ),
        moe=MoeConfig(
            num_experts=16,
            experts_per_token=2,
            expert_width=16 if is_tiny else 512,
            latent_width=16 if is_tiny else 512,
            dense_width=2 * width,
        ),
        vision=VisionConfig(num_layers=0),
        loss_chunk_tokens=16 if is_tiny else 1024,
    )
    return RunConfig(
        model=model,
        mesh=mesh,
        data=DataConfig(
            source="none", tokenizer="none", image_token="", row_tokens=16 if is_tiny else 512, rows=16, row_patches=0
        ),
        training=TrainingConfig(accumulation=4 if mesh.pipe > 1 else 1),
    )


def of_dtype(config: RunConfig, dtype: str) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def compiled(config: RunConfig, dtype: str) -> jax.stages.Compiled:
    config = of_dtype(config, dtype)
    mesh = make_mesh(config.mesh)
    state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
    # On a GPU products of float32 numbers keep 10 bits of them unless told otherwise.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        value_and_gradient = jax.jit(make_value_and_gradient(config, mesh))
        lowered = value_and_gradient.lower(state.parameters, state.router_biases, batch)
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def step(config: RunConfig, dtype: str, program: jax.stages.Compiled) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Loss and gradients; every parameter starts random, since a zero would hide others' gradients."""
    config = of_dtype(config, dtype)
    mesh = make_mesh(config.mesh)
    state = abstract_state(config, mesh)
    plain = dataclasses.replace(config, mesh=MeshConfig(), model=without_pipeline(config.model))
    described = abstract_state(plain, make_mesh(MeshConfig())).parameters
    random, scale = np.random.default_rng(0), config.model.width**-0.5
    drawn = {path: random.normal(size=described[path].shape, scale=scale) for path in sorted(described)}
    drawn = Relayout(plain.model, config.model).apply(drawn, state.parameters, np)
    biases = {path: np.zeros(leaf.shape) for path, leaf in state.router_biases.items()}
    loss, _, _, found = program(
        place_arrays(drawn, state.parameters),
        place_arrays(biases, state.router_biases),
        place_batch(packed(draw_batch(config)), mesh),
    )
    return np.asarray(loss), {path: np.asarray(jax.device_get(array), np.float32) for path, array in found.items()}


def packed(batch: Batch) -> Batch:
    """Rows of three documents of uneven lengths, and padding at the end of all but the first."""
    rows, length = batch.tokens.shape
    random = np.random.default_rng(1)
    for row in range(rows):
        ends = (
            sorted(random.choice(np.arange(2, length), 3, replace=False)) if row else [length // 3, length // 2, length]
        )
        begin = 0
        batch.segment_ids[row], batch.loss_weight[row] = 0, 0
        for document, end in enumerate(ends, start=1):
            batch.segment_ids[row, begin:end] = document
            batch.positions[row, begin:end] = np.arange(end - begin)
            batch.loss_weight[row, begin : end - 1] = 1
            begin = end
    return batch
