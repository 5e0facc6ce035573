"""The training step: one `shard_map` for loss and gradient, then the optimizer and the router update, one program."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.axes import DATA_AXES, TENSOR
from mmjax.checkpoint.adapters import define_run, read_start
from mmjax.checkpoint.weights import load_weights
from mmjax.config import ModelConfig, RunConfig
from mmjax.data.batch import Batch
from mmjax.models.decoder import LayerRecord
from mmjax.models.layers import at_least_float32, initial_arrays
from mmjax.models.moe import RouterStatistics
from mmjax.models.multimodal import Arrays, ModelDefinition, MultimodalModel
from mmjax.parallel.fsdp import make_varying, varying_like
from mmjax.parallel.sharding import spec, variable_spec
from mmjax.resilience.router_update import update_bias
from mmjax.training.optimizer import learning_rate, make_optimizer, num_updates
from pallas_kernels.cross_entropy.api import cross_entropy


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
    specs = specs_of(definition.parameters | definition.frozen)

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Optimizer moments carry their parameter's path as the last key; counters and biases are held whole.
        leaf_spec = specs.get(getattr(path[-1], "key", ""), PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf_spec))

    arrays = (
        {path: v.get_value() for path, v in variables.items()}
        for variables in (definition.parameters, definition.router_biases, definition.frozen)
    )
    state = jax.eval_shape(functools.partial(_fresh_state, config, definition), *arrays)
    return jax.tree_util.tree_map_with_path(place, state)


def specs_of(variables: Mapping[str, nnx.Variable]) -> dict[str, PartitionSpec]:
    """How each array rests on a mesh, by path."""
    return {path: variable_spec(v, v.get_value().ndim) for path, v in variables.items()}


def init_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """A fresh train state, made on the mesh it lives on. The numbers do not depend on the mesh.

    The model's arrays come from `config.weights` where it is given.

    Raises:
      CheckpointError: the weights cannot be read, or are of another model.
    """
    definition, abstract = define_run(config), abstract_state(config, mesh)
    base = base_arrays(config, abstract)
    if config.lora.rank:
        key, shardings = jax.random.key(config.seed), {p: leaf.sharding for p, leaf in abstract.parameters.items()}
        parameters = initial_arrays(definition.parameters, key, shardings)
        if config.lora.start:
            parameters = place_factors(read_start(config), abstract.parameters)
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


def place_factors(factors: Mapping[str, np.ndarray], abstract: Arrays) -> Arrays:
    """Host arrays, whole on every process, as they rest on the mesh."""
    return {
        path: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda i, f=factors[path], d=leaf.dtype: f[i].astype(d)
        )
        for path, leaf in abstract.items()
    }


def base_arrays(config: RunConfig, abstract: TrainState) -> Arrays:
    """The arrays of the model itself, adapters left out, from `config.weights` or drawn.

    Raises:
      CheckpointError: the weights cannot be read, or are of another model.
    """
    wanted = abstract.router_biases | abstract.frozen | ({} if config.lora.rank else abstract.parameters)
    if config.weights:
        return load_weights(config.weights, wanted)
    definition = define_run(config)
    variables = definition.parameters | definition.router_biases | definition.frozen
    shardings = {path: leaf.sharding for path, leaf in wanted.items()}
    return initial_arrays({path: variables[path] for path in wanted}, jax.random.key(config.seed), shardings)


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
    """A host batch (whole, on every process) as global arrays on the mesh."""
    return jax.tree.map(
        lambda array, array_spec: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, array_spec), lambda index: array[index]
        ),
        batch,
        batch_specs(),
    )


def make_train_step(config: RunConfig, mesh: Mesh):
    """Jitted `(state, batch) -> (state, metrics)`; the state is donated. Metrics are scalars by name."""
    value_and_gradient = make_value_and_gradient(config, mesh)
    update = make_update(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return update(state, *value_and_gradient(state.parameters, state.router_biases, batch, state.frozen))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))


def make_update(config: RunConfig):
    """`(state, loss, StepReport, token counts, gradients) -> (state, metrics)` on global arrays.

    A step whose loss or gradient norm is not finite changes only the counters.
    """
    definition = define_run(config)
    optimizer = make_optimizer(config.optimizer, config.training.steps, definition.parameters)
    schedule = learning_rate(config.optimizer, config.training.steps)

    def update(
        state: TrainState, loss: jax.Array, report: "StepReport", counts: dict[str, jax.Array], gradients: Arrays
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        gradient_norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        # optax mixes its counters with floats, which the strict promotion of our own code refuses.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        changed = (
            optax.apply_updates(state.parameters, updates),
            # A frozen router keeps its correction bias.
            state.router_biases
            if config.lora.rank
            else update_routers(config.model, state.router_biases, report.routers, counts["real_tokens"]),
            optimizer_state,
        )
        kept = (state.parameters, state.router_biases, state.optimizer)
        parameters, router_biases, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), changed, kept
        )
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


class StepReport(NamedTuple):
    """What the forward passes of a step counted; adds up over micro-batches and devices."""

    routers: dict[str, RouterStatistics]
    """By the path of the layer's MLP; leaves with a leading repeats axis."""
    nonfinite_layers: jax.Array
    """[num_layers] int32: on how many devices, in how many micro-batches, the layer's running sum was not finite."""
    indexer_loss: jax.Array
    """Sum over layers and tokens of the indexer's KL."""


def make_value_and_gradient(config: RunConfig, mesh: Mesh):
    """`(parameters, router_biases, batch, frozen={}) -> (loss, StepReport, token counts, gradients)` on global arrays.

    loss = sum of cross-entropy over supervised tokens / their number
         + loss_coefficient * sum over layers of the indexer's KL / number of real tokens

    Both numbers are counted over the whole batch, so that neither the mesh nor accumulation changes the loss.
    """
    definition = define_run(config)
    parameter_specs, whole = specs_of(definition.parameters), PartitionSpec()

    def on_device(parameters: Arrays, router_biases: Arrays, batch: Batch, frozen: Arrays):
        counts = {
            "supervised_tokens": lax.psum(jnp.sum(batch.loss_weight), DATA_AXES),
            "real_tokens": lax.psum(jnp.sum(batch.segment_ids > 0, dtype=jnp.int32), DATA_AXES),
        }
        accumulation = config.training.accumulation
        micro_batches = jax.tree.map(
            lambda array: array.reshape(accumulation, array.shape[0] // accumulation, *array.shape[1:]), batch
        )
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
        in_specs=(parameter_specs, whole, batch_specs(), specs_of(definition.frozen)),
        out_specs=(whole, whole, whole, parameter_specs),
        check_vma=True,
    )

    def value_and_gradient(parameters: Arrays, router_biases: Arrays, batch: Batch, frozen: Arrays | None = None):
        return on_mesh(parameters, router_biases, batch, frozen or {})

    return value_and_gradient


def micro_batch_loss(
    model: MultimodalModel, batch: Batch, counts: dict[str, jax.Array]
) -> tuple[jax.Array, StepReport]:
    """The loss's share of one micro-batch, summed over the mesh, and what this device counted."""
    hidden, records = model(batch)
    wide = at_least_float32(hidden.dtype)
    token_loss = cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        model.decoder.head_weights(hidden.dtype),
        batch.targets.reshape(-1),
        batch.loss_weight.reshape(-1).astype(wide),
        chunk_tokens=model.model.loss_chunk_tokens,
        vocabulary_axis=TENSOR,
    )
    report = make_report(model.model, records)
    share = token_loss / jnp.maximum(counts["supervised_tokens"], 1).astype(wide)
    coefficient = model.model.full_attention.indexer.loss_coefficient
    share += coefficient * report.indexer_loss / jnp.maximum(counts["real_tokens"], 1).astype(wide)
    return lax.psum(share, DATA_AXES), jax.tree.map(lax.stop_gradient, report)


def make_report(model: ModelConfig, records: tuple[tuple[LayerRecord, ...], ...]) -> StepReport:
    """Records nested as [segment][position], with a leading repeats axis -> the step's report."""
    routers, nonfinite, indexer_loss = {}, [], jnp.zeros((), at_least_float32(model.compute_dtype))
    for index, segment_records in enumerate(records):
        for position, record in enumerate(segment_records):
            if record.router is not None:
                routers[f"decoder.segments.{index}.layers.{position}.mlp"] = record.router
            indexer_loss += jnp.sum(record.indexer_loss)
        # [repeats, positions] -> order of the layers
        flags = jnp.stack([~record.is_finite for record in segment_records], axis=1)
        nonfinite.append(flags.reshape(-1).astype(jnp.int32))
    return StepReport(routers, jnp.concatenate(nonfinite), indexer_loss)


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
