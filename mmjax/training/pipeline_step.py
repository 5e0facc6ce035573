"""The step of a pipeline: what each stage does in a tick of the schedule, and the sums over stages at its end."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES, PIPE
from mmjax.config import RunConfig
from mmjax.data.batch import Batch
from mmjax.models.layers import at_least_float32
from mmjax.models.layout import num_devices
from mmjax.models.multimodal import Arrays, ModelDefinition, MultimodalModel
from mmjax.parallel.fsdp import make_varying, varying_like
from mmjax.parallel.pipeline import Message, Operate, Work, run_schedule
from mmjax.parallel.pipeline_schedule import Kind, forward_schedule
from mmjax.parallel.pipeline_work import latency_of, schedule_of
from mmjax.parallel.sharding import RULES
from mmjax.training.loss import StepReport
from mmjax.training.pipeline_stages import WORK_AXES, Stages, stages_of


def split_rows(batch: Batch, number: int) -> Batch:
    """[b, ...] -> [number, b / number, ...] of each field."""

    def split(array: jax.Array) -> jax.Array:
        shape = number, array.shape[0] // number, *array.shape[1:]
        # XLA of jax 0.11 ends the process where devices are given an empty array that a loop reads: made here, none is.
        return array.reshape(shape) if array.size else varying_like(jnp.zeros(shape, array.dtype), array)

    return jax.tree.map(split, batch)


class _Totals(NamedTuple):
    """What the operations of a step add up and hand on."""

    loss: jax.Array
    report: StepReport
    gradients: Arrays
    of_embedded: Any
    """What the first stage starts from, of all micro-batches, or its gradient."""
    kept: Any
    """Of micro-batches under way: what their stage keeps, leaves with a leading axis of slots."""

    def with_found(self, share: jax.Array, report: StepReport | None) -> "_Totals":
        """And what a stage counted; a report names the routers of its stage alone."""
        totals = self._replace(loss=self.loss + share)
        if report is None:
            return totals
        routers = {
            path: jax.tree.map(jnp.add, old, report.routers[path]) if path in report.routers else old
            for path, old in self.report.routers.items()
        }
        nonfinite = self.report.nonfinite_layers + report.nonfinite_layers
        return totals._replace(report=StepReport(routers, nonfinite, self.report.indexer_loss + report.indexer_loss))

    def with_gradients(self, gradients: Arrays) -> "_Totals":
        """And gradients of those arrays that an operation used."""
        old = self.gradients
        added = {path: old[path] + gradient.astype(old[path].dtype) for path, gradient in gradients.items()}
        return self._replace(gradients=old | added)


def pipeline_gradient(
    config: RunConfig,
    definition: ModelDefinition,
    parameters: Arrays,
    router_biases: Arrays,
    batch: Batch,
    frozen: Arrays,
    counts: dict[str, jax.Array],
) -> tuple[jax.Array, StepReport, Arrays]:
    """This device's (loss, report, gradients), summed over the mesh where they are whole. Inside `shard_map`."""
    schedule, stages = schedule_of(config), stages_of(config.model)
    micro_batches = split_rows(batch, config.training.accumulation)
    # Marked as varying once, outside the loop: the sum over devices, and over stages of what they share, happens once.
    varying, reduce_gradients = jax.vjp(functools.partial(make_varying, mesh_axes=WORK_AXES), parameters)
    frozen, router_biases = (make_varying(arrays, WORK_AXES) for arrays in (frozen, router_biases))
    is_split = config.training.pipeline_schedule == "split_backward"
    embedded, embed_backward = None, None
    if config.training.pipeline_edges == "data_parallel":
        edges = {path: array for path, array in varying.items() if stages.is_edge(path)}

        def embed(edges: Arrays) -> Any:
            return stages.embed_share(definition.assemble(varying | edges, router_biases, frozen), micro_batches)

        embedded, embed_backward = jax.vjp(embed, edges) if edges else (embed(edges), None)

    # One buffer: what the first stage starts from, then its gradient. Gradients of weights split off need both.
    is_replaced = embed_backward is not None and not is_split

    def run_stage(
        number: int, pass_kind: Kind, used: Arrays, first: Any, work: Work, kept: Any
    ) -> tuple[tuple[Message, jax.Array], tuple[StepReport | None, Any]]:
        """((what goes to the next stage, the share of the loss), (report, what is kept)) of one micro-batch.

        `first` is what the first stage starts from, where it does not make that itself. Backward passes run it once
        more, from what was `kept`, for those gradients that are wanted.
        """

        def assemble(trained: Mapping[str, jax.Array], others: Mapping[str, jax.Array]) -> MultimodalModel:
            return definition.assemble(varying | used | dict(trained), router_biases, frozen | dict(others))

        rows = _pick(micro_batches, work.micro_batch)
        has_gradients = pass_kind is Kind.WEIGHT or not is_split
        again = functools.partial(stages.run_again, kept, has_gradients)
        run = stages.run_micro_batch if pass_kind is Kind.FORWARD else again
        output, share, report, kept = run(number, assemble, (used, frozen), work, rows, first, counts)
        return (output, share), (jax.tree.map(lax.stop_gradient, report), kept)

    # Jitted so that a stage is traced once, for the shapes of its results and for both passes.
    run_jitted = functools.cache(lambda *static: jax.jit(functools.partial(run_stage, *static)))

    def used_by(number: int) -> Arrays:
        return {path: array for path, array in varying.items() if stages.used(number, path, embedded is not None)}

    def first_of(number: int, of_embedded: Any, work: Work) -> Any:
        held = of_embedded if is_replaced else embedded
        return _pick(held, work.micro_batch) if number == 0 and held is not None else None

    def forward(number: int, totals: _Totals, work: Work) -> tuple[_Totals, Message, Message]:
        first = first_of(number, totals.of_embedded, work)
        (output, share), (report, kept) = run_jitted(number, Kind.FORWARD)(used_by(number), first, work, ())
        totals = totals.with_found(share, report)
        return totals._replace(kept=_put(totals.kept, kept, work.kept)), output, ()

    def backward(number: int, kind: Kind, totals: _Totals, work: Work) -> tuple[_Totals, Message, Message]:
        """The gradients of a stage, which runs once more from its input unless it kept enough.

        A last stage that runs again has its forward pass here alone.
        """
        wants_weights = kind is Kind.WEIGHT or not is_split
        # What gradients are wanted of: weights, the input of a later stage, or what the first one starts from.
        used, first = used_by(number) if wants_weights else {}, first_of(number, totals.of_embedded, work)
        is_first_trained = kind is Kind.BACKWARD and embed_backward is not None
        wants_input = stages.has_input(number) and kind is Kind.BACKWARD
        inputs = (work.input if wants_input else (), first if is_first_trained else None)
        kept = _pick(totals.kept, work.kept)

        def objective(used: Arrays, inputs: tuple[Message, Any]) -> tuple[tuple[Message, jax.Array], Any]:
            message, start = inputs
            start = first if start is None else start
            again = work._replace(input=message or work.input)
            return run_jitted(number, kind)(used_by(number) | used, start, again, kept)

        (output, share), pullback, (report, _) = jax.vjp(objective, used, inputs, has_aux=True)
        one = varying_like(jnp.ones_like(share), share)
        gradients, (input_cotangent, first_cotangent) = pullback((work.cotangent[: len(output)], one))
        if kind is Kind.BACKWARD and stages.counts_backward(number):
            totals = totals.with_found(share, report)
        totals = totals.with_gradients(gradients)
        if first_cotangent is not None:
            placed = stages.placed(work, first_cotangent, _pick(totals.of_embedded, work.micro_batch))
            totals = totals._replace(of_embedded=_put(totals.of_embedded, placed, work.micro_batch))
        return totals, (), input_cotangent

    operations: list[Operate] = []
    numbers: dict[tuple, int] = {}

    def operation_of(kind: Kind, stage: int) -> int | None:
        has_input = stage > 0 or embed_backward is not None
        is_nothing = stages.runs_again and stage == stages.last and kind is Kind.FORWARD
        if is_nothing or (kind is Kind.BACKWARD and is_split and not has_input):
            return None
        key = (kind, stages.pattern(stage))
        if key not in numbers:
            numbers[key] = len(operations)
            run = (
                functools.partial(forward, stage) if kind is Kind.FORWARD else functools.partial(backward, stage, kind)
            )
            operations.append(run)
        return numbers[key]

    kinds = {operation.kind for tick in schedule.ticks for operation in tick} - {Kind.IDLE}
    for kind in sorted(kinds):
        for stage in range(schedule.num_stages):
            operation_of(kind, stage)

    message = stages.message(_pick(micro_batches, 0))
    trained = embedded if embed_backward is not None else None
    of_embedded = trained if is_replaced else jax.tree.map(zeros_like, trained)

    def results_of(number: int, work: Work) -> tuple[StepReport | None, Any]:
        return run_jitted(number, Kind.FORWARD)(used_by(number), first_of(number, of_embedded, work), work, ())[1]

    report, kept = stages.empty_results(results_of, message)
    # What runs before the loop alone gets its gradients after it.
    in_loop = sorted(set().union(*(used_by(stage) for stage in range(schedule.num_stages))))
    gradients = {path: zeros_like(varying[path], at_least_float32(varying[path].dtype)) for path in in_loop}
    loss = make_varying(jnp.zeros((), at_least_float32(config.model.compute_dtype)), WORK_AXES)
    kept = stages.empty_kept(kept, schedule.slots().kept_of_device)
    totals = _Totals(loss, report, gradients, of_embedded, kept)
    totals = run_schedule(
        schedule, operations, operation_of, totals, message, stages.num_arrays, runs_again=stages.runs_again
    )
    loss, report, gradients, of_embedded, _ = totals
    if embed_backward is not None:
        is_first = lax.axis_index(PIPE) == 0
        # The other devices hold no gradients, but what the first stage would start from.
        of_embedded = jax.tree.map(lambda leaf: jnp.where(is_first, leaf, jnp.zeros_like(leaf)), of_embedded)
        for path, gradient in embed_backward(of_embedded)[0].items():
            wide = gradient.astype(at_least_float32(gradient.dtype))
            gradients[path] = gradients[path] + wide if path in gradients else wide
    gradients = {path: gradients[path] if path in gradients else zeros_like(varying[path]) for path in varying}
    (gradients,) = reduce_gradients({path: g.astype(varying[path].dtype) for path, g in gradients.items()})
    report = StepReport(
        routers=jax.tree.map(lambda leaf: lax.psum(leaf, DATA_AXES), report.routers),
        nonfinite_layers=lax.psum(report.nonfinite_layers, WORK_AXES),
        indexer_loss=lax.psum(report.indexer_loss, WORK_AXES),
    )
    return lax.psum(loss, WORK_AXES), report, gradients


def zeros_like(array: jax.Array, dtype: Any = None) -> jax.Array:
    """Zeros that vary over the mesh as `array` does."""
    return varying_like(jnp.zeros(array.shape, dtype or array.dtype), array)


def report_specs() -> StepReport:
    """How a report rests on the mesh: routers with the layers of their device, the rest whole."""
    routers, whole = cast("Any", PartitionSpec(RULES["stage"])), cast("Any", PartitionSpec())
    return StepReport(routers=routers, nonfinite_layers=whole, indexer_loss=whole)


def pipeline_forward(
    config: RunConfig,
    model: MultimodalModel,
    batch: Batch,
    finish: Callable[[MultimodalModel, jax.Array, Batch], jax.Array],
) -> jax.Array:
    """`finish(model, hidden values, rows)` of all rows [b, ...], from the last stage. Inside `shard_map`.

    The rows go through the stages in as many equal parts as can be, up to what fills them.
    """
    stages, rows = Stages(config.model), batch.tokens.shape[0]
    devices, chunks, latency = num_devices(config.model), config.model.pipeline_chunks, latency_of(config)
    wanted = latency * devices
    # Interleaved stages take whole rings of micro-batches.
    number = wanted if rows % wanted == 0 else max(n for n in range(1, wanted + 1) if rows % n == 0)
    if chunks > 1 and number != wanted:
        raise ValueError(f"{rows} rows of a device are no multiple of {wanted}, which interleaved stages need")
    schedule = forward_schedule(num_devices=devices, num_micro_batches=number, num_chunks=chunks, latency=latency)
    micro_batches = split_rows(batch, number)

    def forward(stage: int, totals: jax.Array, work: Work) -> tuple[jax.Array, Message, Message]:
        part = _pick(micro_batches, work.micro_batch)
        output, _ = stages.run(model, stage, work.input, part)
        if stage != stages.last:
            return totals, output, ()
        result = finish(model, output[0], part)
        return lax.dynamic_update_index_in_dim(totals, result.astype(totals.dtype), work.micro_batch, 0), (), ()

    patterns = {stages.pattern(stage): stage for stage in reversed(range(schedule.num_stages))}
    order = list(patterns)
    operations = [functools.partial(forward, patterns[pattern]) for pattern in order]
    message = stages.message(_pick(micro_batches, 0))
    hidden = jnp.zeros((*micro_batches.tokens.shape[1:], config.model.width), config.model.compute_dtype)
    shape = jax.eval_shape(lambda: finish(model, make_varying(hidden, WORK_AXES), _pick(micro_batches, 0)))
    totals = make_varying(jnp.zeros((number, *shape.shape), shape.dtype), WORK_AXES)
    totals = run_schedule(
        schedule, operations, lambda _, stage: order.index(stages.pattern(stage)), totals, message, stages.num_arrays
    )
    # Zeros everywhere but on the last stage.
    return lax.psum(totals, PIPE).reshape(rows, *shape.shape[1:])


def _pick(tree: Any, number: jax.Array | int) -> Any:
    """Leaves [m, ...] at one micro-batch."""
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, number, keepdims=False), tree)


def _put(tree: Any, values: Any, number: jax.Array) -> Any:
    """Leaves [m, ...] with `values` at one micro-batch."""
    return jax.tree.map(lambda array, new: lax.dynamic_update_index_in_dim(array, new, number, 0), tree, values)
