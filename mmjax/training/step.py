"""The training step: one `shard_map` for loss and gradient, then the optimizer and the router update, one program."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.axes import CONTEXT, DATA_AXES, MESH_AXES_OF_EXPERTS, PIPE
from mmjax.checkpoint.adapters import define_run, read_start
from mmjax.checkpoint.tower_weights import PROJECTOR, TOWER, load_audio
from mmjax.checkpoint.weights import load_weights
from mmjax.config import ModelConfig, RunConfig, layer_kinds
from mmjax.data.batch import Batch
from mmjax.models.layers import at_least_float32, initial_arrays
from mmjax.models.layout import Relayout, without_pipeline
from mmjax.models.moe import RouterStatistics
from mmjax.models.multimodal import Arrays, ModelDefinition
from mmjax.parallel.context import split_positions
from mmjax.parallel.expert import check_transport
from mmjax.parallel.fsdp import make_varying, varying_like
from mmjax.parallel.sharding import spec, variable_spec
from mmjax.resilience.router_update import update_bias
from mmjax.training.loss import StepReport, micro_batch_loss, router_losses
from mmjax.training.optimizer import learning_rate, make_optimizer, num_updates
from mmjax.training.pipeline_step import pipeline_gradient, report_specs, split_rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parameters", "router_biases", "frozen", "optimizer", "step", "nonfinite_steps"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Arrays are global, split over the mesh as the sharding table says."""

    parameters: Arrays
    router_biases: Arrays
    optimizer: Any
    step: jax.Array
    """int32: steps done, skipped ones included."""
    nonfinite_steps: jax.Array
    """int32: steps in a row, up to now, whose loss or gradient was not finite."""
    frozen: Arrays = dataclasses.field(default_factory=dict)
    """What nothing moves: under adapters the model itself. Passed on as it is."""


def abstract_state(config: RunConfig, mesh: Mesh | jax.sharding.AbstractMesh) -> TrainState:
    """The train state as shapes, dtypes and shardings; needs no device when the mesh is abstract."""
    definition = define_run(config)
    specs = specs_of(definition.parameters | definition.router_biases | definition.frozen, mesh)

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Optimizer moments carry their parameter's path as the last key; counters are held whole.
        leaf_spec = specs.get(getattr(path[-1], "key", ""), PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf_spec))

    arrays = (
        {path: v.get_value() for path, v in variables.items()}
        for variables in (definition.parameters, definition.router_biases, definition.frozen)
    )
    state = jax.eval_shape(functools.partial(_fresh_state, config, definition), *arrays)
    return jax.tree_util.tree_map_with_path(place, state)


def specs_of(variables: Mapping[str, nnx.Variable], mesh: Mesh | jax.sharding.AbstractMesh) -> dict[str, PartitionSpec]:
    """How each array rests on a mesh, by path."""
    return {path: variable_spec(variable, mesh.shape) for path, variable in variables.items()}


def init_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """A fresh train state, made on the mesh it lives on. The numbers do not depend on the mesh.

    The model's arrays come from `config.weights` where it is given.

    Raises:
      CheckpointError: the weights cannot be read, or are of another model.
    """
    definition, abstract = define_run(config), abstract_state(config, mesh)
    base = base_arrays(config, abstract)
    if config.lora.rank:
        if config.lora.start:
            plain = without_pipeline(config.model)
            factors = read_start(dataclasses.replace(config, model=plain))
            factors = Relayout(plain, config.model).apply(factors, abstract.parameters, np)
            parameters = place_arrays(factors, abstract.parameters)
        else:
            parameters = _draw(config, abstract.parameters)
    else:
        parameters = {path: base[path] for path in abstract.parameters}
    router_biases = {path: base[path] for path in abstract.router_biases}
    frozen = {path: base[path] for path in abstract.frozen}
    fresh = jax.jit(
        functools.partial(_fresh_state, config, definition),
        donate_argnums=(0, 1, 2),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    return fresh(parameters, router_biases, frozen)


def place_arrays(arrays: Mapping[str, np.ndarray], abstract: Arrays) -> Arrays:
    """Host arrays, whole on every process, as they rest on the mesh."""
    return {
        path: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda i, a=arrays[path], d=leaf.dtype: a[i].astype(d)
        )
        for path, leaf in abstract.items()
    }


def base_arrays(config: RunConfig, abstract: TrainState) -> Arrays:
    """The arrays of the model itself, adapters left out, from `config.weights` and `audio_weights` or drawn.

    Raises:
      CheckpointError: the weights cannot be read, or are of another model.
    """
    wanted = abstract.router_biases | abstract.frozen | ({} if config.lora.rank else abstract.parameters)
    heard = {}
    if config.audio_weights:
        tower, projector = (
            {path: leaf for path, leaf in wanted.items() if path.startswith(part)} for part in (TOWER, PROJECTOR)
        )
        heard = place_arrays(load_audio(config.audio_weights, config.model), tower) | _draw(config, projector)
    others = {path: leaf for path, leaf in wanted.items() if path not in heard}
    if config.weights:
        return load_weights(config.weights, others, config.model) | heard
    return _draw(config, others) | heard


def _draw(config: RunConfig, abstract: Arrays) -> Arrays:
    """Arrays of a run at its start. A layer's numbers are those it has without a pipeline."""
    model, plain = config.model, without_pipeline(config.model)
    definition = define_run(dataclasses.replace(config, model=plain))
    variables = definition.parameters | definition.router_biases | definition.frozen
    shardings = {path: leaf.sharding for path, leaf in abstract.items()}
    key = jax.random.key(config.seed)
    if model == plain:
        return initial_arrays({path: variables[path] for path in abstract}, key, shardings)
    relayout = Relayout(plain, model)
    wanted = {origin: variables[origin] for path in abstract for origin, _ in relayout.origins(path)}
    mesh = next(iter(shardings.values())).mesh
    specs = specs_of(wanted, mesh)
    drawn = initial_arrays(wanted, key, {path: NamedSharding(mesh, specs[path]) for path in wanted})
    return jax.jit(lambda arrays: relayout.apply(arrays, abstract), out_shardings=shardings)(drawn)


def saved_part(config: RunConfig, state: TrainState) -> TrainState:
    """What a checkpoint holds: under adapters not the model, which `base_arrays` gives again."""
    return dataclasses.replace(state, router_biases={}, frozen={}) if config.lora.rank else state


def with_base(config: RunConfig, abstract: TrainState, saved: TrainState) -> TrainState:
    """The state whose `saved_part` is `saved`.

    Raises:
      CheckpointError: the weights cannot be read, or are of another model.
    """
    if not config.lora.rank:
        return saved
    base = base_arrays(config, abstract)
    router_biases = {path: base[path] for path in abstract.router_biases}
    return dataclasses.replace(saved, router_biases=router_biases, frozen={p: base[p] for p in abstract.frozen})


def _fresh_state(
    config: RunConfig, definition: ModelDefinition, parameters: Arrays, router_biases: Arrays, frozen: Arrays
) -> TrainState:
    optimizer = make_optimizer(config.optimizer, config.training.steps, definition.parameters)
    return TrainState(
        parameters=parameters,
        router_biases=router_biases,
        frozen=frozen,
        optimizer=optimizer.init(parameters),
        step=jnp.zeros((), jnp.int32),
        nonfinite_steps=jnp.zeros((), jnp.int32),
    )


def batch_specs() -> Batch:
    """PartitionSpec of each field of a batch: rows over the row axes, positions over context."""
    row = spec("batch", "position")
    return Batch(
        tokens=row,
        targets=row,
        loss_weight=row,
        segment_ids=row,
        positions=row,
        feature_index=row,
        patches=spec("batch", None, None),
        patch_segment_ids=spec("batch", None),
        patch_position=spec("batch", None, None),
        patch_grid=spec("batch", None, None),
        patch_feature=spec("batch", None),
        spectrograms=spec("batch", None, None, None),
        sound_index=row,
    )


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A host batch (whole, on every process) as global arrays on the mesh, positions in its context axis's order."""

    def place(array: np.ndarray, array_spec: PartitionSpec) -> jax.Array:
        if array_spec[1]:
            array = split_positions(array, mesh.shape[CONTEXT])
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, array_spec), lambda index: array[index])

    return jax.tree.map(place, batch, batch_specs())


def make_train_step(config: RunConfig, mesh: Mesh):
    """Jitted `(state, batch) -> (state, metrics)`; the state is donated. Metrics are scalars by name."""
    value_and_gradient = make_value_and_gradient(config, mesh)
    update = make_update(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return update(state, *value_and_gradient(state.parameters, state.router_biases, batch, state.frozen))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    options: dict[str, Any] = {}
    if mesh.devices.flat[0].platform != "cpu":
        # Said either way: what XLA does by itself changed between versions.
        options["xla_gpu_enable_dynamic_slice_fusion"] = config.training.weights_in_place
        if config.training.exchanges_at_once > 1:
            options["xla_gpu_experimental_parallel_collective_overlap_limit"] = config.training.exchanges_at_once
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        compiler_options=options,
    )


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What XLA is told where it tries out choices on the devices that are here."""
    # Products by cuBLAS alone: it has a few algorithms for each, Triton has so many that a step takes minutes.
    return {} if mesh.devices.flat[0].platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}


def make_update(config: RunConfig):
    """`(state, loss, StepReport, token counts, gradients) -> (state, metrics)` on global arrays.

    A step whose loss or gradient norm is not finite changes only the counters.
    """
    definition = define_run(config)
    optimizer = make_optimizer(config.optimizer, config.training.steps, definition.parameters)
    schedule = learning_rate(config.optimizer, config.training.steps)

    def update(
        state: TrainState, loss: jax.Array, report: StepReport, counts: dict[str, jax.Array], gradients: Arrays
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        gradient_norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        # optax mixes its counters with floats, which the strict promotion of our own code refuses.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        # A frozen router keeps its correction bias; one that is trained needs it to stay balanced.
        moving = {path: bias for path, bias in state.router_biases.items() if router_of(path) in state.parameters}
        changed = (
            optax.apply_updates(state.parameters, updates),
            state.router_biases | update_routers(config.model, moving, report.routers, counts["real_tokens"]),
            optimizer_state,
        )
        kept = (state.parameters, state.router_biases, state.optimizer)
        parameters, router_biases, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), changed, kept
        )
        losses = router_losses(config.model, report.routers)
        metrics = {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "learning_rate": jnp.asarray(schedule(num_updates(state.optimizer).astype(jnp.float32)), jnp.float32),
            "is_finite": is_finite,
            "first_nonfinite_layer": first_true(report.nonfinite_layers > 0),
            "first_nonfinite_gradient": first_true(
                jnp.stack([~jnp.isfinite(jnp.sum(gradients[path])) for path in sorted(gradients)])
            ),
            "indexer_loss": report.indexer_loss / counts["real_tokens"].astype(report.indexer_loss.dtype),
            "moe_load_max_over_mean": worst_load(report.routers),
            "exchange_rounds": mean_rounds(config, report.routers),
            **{name: total / counts["real_tokens"].astype(total.dtype) for name, total in losses.items()},
            "dropped_rows": sum(
                (jnp.sum(router.dropped, dtype=jnp.int32) for router in report.routers.values()), jnp.int32(0)
            ),
            **counts,
        }
        new_state = TrainState(
            parameters=parameters,
            router_biases=router_biases,
            frozen=state.frozen,
            optimizer=optimizer_state,
            step=state.step + 1,
            nonfinite_steps=jnp.where(is_finite, 0, state.nonfinite_steps + 1),
        )
        return new_state, metrics

    return update


def make_value_and_gradient(config: RunConfig, mesh: Mesh):
    """`(parameters, router_biases, batch, frozen={}) -> (loss, StepReport, token counts, gradients)` on global arrays.

    loss = sum of cross-entropy over supervised tokens / their number
         + loss_coefficient * sum over layers of the indexer's KL / number of real tokens
         + the routers' losses with their coefficients, summed over layers and real tokens / number of real tokens

    Both numbers are counted over the whole batch, so that neither the mesh nor accumulation changes the loss. (The
    balance over a `batch` is over each micro-batch.)

    Raises:
      ConfigurationError: the mesh's devices cannot exchange as the settings say.
    """
    check_transport(config.model.moe.transport, MESH_AXES_OF_EXPERTS[config.model.moe.expert_axes], mesh)
    definition = define_run(config)
    parameter_specs, whole = specs_of(definition.parameters, mesh), PartitionSpec()
    bias_specs, frozen_specs = specs_of(definition.router_biases, mesh), specs_of(definition.frozen, mesh)
    is_pipeline = mesh.shape[PIPE] > 1

    def on_device(parameters: Arrays, router_biases: Arrays, batch: Batch, frozen: Arrays):
        counts = {
            "supervised_tokens": lax.psum(jnp.sum(batch.loss_weight), DATA_AXES),
            "real_tokens": lax.psum(jnp.sum(batch.segment_ids > 0, dtype=jnp.int32), DATA_AXES),
        }
        if is_pipeline:
            found = pipeline_gradient(config, definition, parameters, router_biases, batch, frozen, counts)
            loss, report, gradients = found
            return loss, report, counts, gradients
        micro_batches = split_rows(batch, config.training.accumulation)
        # Marked as varying once, outside the loop: the sum over devices happens once a step, in `reduce_gradients`.
        varying, reduce_gradients = jax.vjp(make_varying, parameters)
        frozen = make_varying(frozen)

        # Jitted so that the model is traced once, not for the sums' shapes and again in the loop.
        @jax.jit
        def run_micro_batch(micro_batch: Batch):
            def objective(varying):
                loss, report = micro_batch_loss(
                    definition.assemble(varying, router_biases, frozen), micro_batch, counts
                )
                return loss, make_varying(report)

            (loss, report), gradients = jax.value_and_grad(objective, has_aux=True)(varying)
            return loss, report, jax.tree.map(lambda g: g.astype(at_least_float32(g.dtype)), gradients)

        def accumulate(total, micro_batch: Batch):
            return jax.tree.map(jnp.add, total, run_micro_batch(micro_batch)), None

        shapes = jax.eval_shape(run_micro_batch, jax.tree.map(lambda array: array[0], micro_batches))
        loss, report, gradients = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        zeros = (loss, make_varying(report), jax.tree.map(varying_like, gradients, varying))
        (loss, report, gradients), _ = lax.scan(accumulate, zeros, micro_batches)
        (gradients,) = reduce_gradients(jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, varying))
        return loss, jax.tree.map(lambda leaf: lax.psum(leaf, DATA_AXES), report), counts, gradients

    on_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(parameter_specs, bias_specs, batch_specs(), frozen_specs),
        out_specs=(whole, report_specs() if is_pipeline else whole, whole, parameter_specs),
        check_vma=True,
    )

    def value_and_gradient(parameters: Arrays, router_biases: Arrays, batch: Batch, frozen: Arrays | None = None):
        return on_mesh(parameters, router_biases, batch, frozen or {})

    return value_and_gradient


def update_routers(
    model: ModelConfig, router_biases: Arrays, routers: dict[str, RouterStatistics], real_tokens: jax.Array
) -> Arrays:
    """The routers' correction biases after a step, from what the whole step counted."""
    return {
        path: update_bias(
            bias, routers[path.rsplit(".", 1)[0]], model.moe.router, model.moe.experts_per_token, real_tokens
        )
        for path, bias in router_biases.items()
    }


def router_of(bias_path: str) -> str:
    """Path of the weights of the router that has this correction bias."""
    return f"{bias_path.rsplit('.', 1)[0]}.router"


def mean_rounds(config: RunConfig, routers: dict[str, RouterStatistics]) -> jax.Array:
    """Rounds of an exchange, the mean of layers, micro-batches and devices: 1 where all fits, 0 without exchange."""
    rounds = [router.rounds for router in routers.values()]
    num_shares = math.prod(config.mesh.sizes[axis] for axis in DATA_AXES) * config.training.accumulation
    num_exchanges = num_shares * max(1, sum(mlp == "moe" for _, mlp in layer_kinds(config.model)))
    return sum((jnp.sum(layers).astype(jnp.float32) for layers in rounds), jnp.float32(0)) / num_exchanges


def worst_load(routers: dict[str, RouterStatistics]) -> jax.Array:
    """Largest expert load over the mean load, of the worst layer; 0 without experts."""
    loads = [router.load.astype(jnp.float32) for router in routers.values()]
    means = [jnp.mean(load, axis=-1) for load in loads]
    ratios = [
        jnp.max(jnp.max(load, axis=-1) / jnp.where(mean > 0, mean, 1)) for load, mean in zip(loads, means, strict=True)
    ]
    return jnp.max(jnp.stack(ratios)) if ratios else jnp.zeros((), jnp.float32)


def first_true(flags: jax.Array) -> jax.Array:
    """int32: index of the first True of `flags` [n]; -1 when there is none."""
    return jnp.where(jnp.any(flags), jnp.argmax(flags), -1).astype(jnp.int32)
