"""The step of a pipeline: what each stage does in a tick of the schedule, and the sums over stages at its end."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES, PIPE
from mmjax.config import ModelConfig, RunConfig
from mmjax.data.batch import Batch
from mmjax.models.decoder import LayerRecord
from mmjax.models.layers import at_least_float32
from mmjax.models.layout import (
    LayerAddress,
    Segment,
    block_layers,
    block_starts,
    layer_address,
    num_devices,
    plan_segments,
    slots_of_kinds,
    stage_layers,
)
from mmjax.models.multimodal import Arrays, ModelDefinition, MultimodalModel
from mmjax.parallel.fsdp import make_varying, varying_like
from mmjax.parallel.pipeline import Message, Operate, Work, run_schedule
from mmjax.parallel.pipeline_schedule import Kind, forward_schedule
from mmjax.parallel.pipeline_work import latency_of, schedule_of
from mmjax.parallel.sharding import RULES
from mmjax.training.loss import StepReport, auxiliary_share, token_share

# Mesh axes over which the work of a step differs.
WORK_AXES = (*DATA_AXES, PIPE)


def split_rows(batch: Batch, number: int) -> Batch:
    """[b, ...] -> [number, b / number, ...] of each field."""
    return jax.tree.map(lambda array: array.reshape(number, array.shape[0] // number, *array.shape[1:]), batch)


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
    schedule, stages = schedule_of(config), _Stages(config.model)
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

    def run_stage(number: int, used: Arrays, first: Any, work: Work) -> tuple[tuple[Message, jax.Array], StepReport]:
        """((what goes to the next stage, the share of the loss), report) of one micro-batch.

        `first` is what the first stage starts from, where it does not make that itself.
        """
        model = definition.assemble(varying | used, router_biases, frozen)
        rows = _pick(micro_batches, work.micro_batch)
        output, records = stages.run(model, number, work.input, rows, first)
        report = stages.report(number, records, jnp.asarray(stages.first_layers)[work.stage])
        share = auxiliary_share(config.model, report, counts)
        if number == stages.last:
            hidden, output = output[0], ()
            share += token_share(model, hidden, rows, counts)
        return (output, make_varying(share, WORK_AXES)), jax.tree.map(lax.stop_gradient, report)

    # Jitted so that a stage is traced once, for its report's shapes and for both passes.
    run_jitted = functools.cache(lambda number: jax.jit(functools.partial(run_stage, number)))

    def used_by(number: int) -> Arrays:
        used = {path: array for path, array in varying.items() if stages.uses(number, path)}
        is_embedded = number == 0 and embedded is not None
        return {path: array for path, array in used.items() if not (is_embedded and stages.is_edge(path))}

    def first_of(number: int, totals: Any, work: Work) -> Any:
        held = totals[-1] if is_replaced else embedded
        return _pick(held, work.micro_batch) if number == 0 and held is not None else None

    def forward(number: int, totals: Any, work: Work) -> tuple[Any, Message, Message]:
        (output, share), report = run_jitted(number)(used_by(number), first_of(number, totals, work), work)
        return _add(totals, share, report, {}), output, ()

    def backward(number: int, kind: Kind, totals: Any, work: Work) -> tuple[Any, Message, Message]:
        """The stage once more from its input, and its gradients. The last stage's forward pass is here alone."""
        wants_weights = kind is Kind.WEIGHT or not is_split
        # What gradients are wanted of: weights, the input of a later stage, or what the first one starts from.
        used, first = used_by(number) if wants_weights else {}, first_of(number, totals, work)
        is_first_trained = kind is Kind.BACKWARD and embed_backward is not None
        inputs = (work.input if number and kind is Kind.BACKWARD else (), first if is_first_trained else None)

        def objective(used: Arrays, inputs: tuple[Message, Any]) -> tuple[tuple[Message, jax.Array], StepReport]:
            message, start = inputs
            start = first if start is None else start
            return run_jitted(number)(used_by(number) | used, start, work._replace(input=message or work.input))

        (output, share), pullback, report = jax.vjp(objective, used, inputs, has_aux=True)
        one = varying_like(jnp.ones_like(share), share)
        gradients, (input_cotangent, first_cotangent) = pullback((work.cotangent[: len(output)], one))
        is_counted = number == stages.last and kind is Kind.BACKWARD
        totals = _add(totals, share if is_counted else None, report if is_counted else None, gradients)
        if first_cotangent is not None:
            *sums, of_embedded = totals
            totals = (*sums, _put(of_embedded, first_cotangent, work.micro_batch))
        return totals, (), input_cotangent

    operations: list[Operate] = []
    numbers: dict[tuple, int] = {}

    def operation_of(kind: Kind, stage: int) -> int | None:
        has_input = stage > 0 or embed_backward is not None
        if (stage == stages.last and kind is Kind.FORWARD) or (kind is Kind.BACKWARD and is_split and not has_input):
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

    def report_of(number: int, work: Work) -> StepReport:
        return run_jitted(number)(used_by(number), first_of(number, (of_embedded,), work), work)[1]

    report = stages.empty_report(report_of, message)
    # What runs before the loop alone gets its gradients after it.
    in_loop = sorted(set().union(*(used_by(stage) for stage in range(schedule.num_stages))))
    gradients = {path: zeros_like(varying[path], at_least_float32(varying[path].dtype)) for path in in_loop}
    loss = make_varying(jnp.zeros((), at_least_float32(config.model.compute_dtype)), WORK_AXES)
    totals = (loss, report, gradients, of_embedded)
    totals = run_schedule(schedule, operations, operation_of, totals, message, stages.needs)
    loss, report, gradients, of_embedded = totals
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
    stages, rows = _Stages(config.model), batch.tokens.shape[0]
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
        schedule, operations, lambda _, stage: order.index(stages.pattern(stage)), totals, message, stages.needs
    )
    # Zeros everywhere but on the last stage.
    return lax.psum(totals, PIPE).reshape(rows, *shape.shape[1:])


def _pick(tree: Any, number: jax.Array | int) -> Any:
    """Leaves [m, ...] at one micro-batch."""
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, number, keepdims=False), tree)


def _put(tree: Any, values: Any, number: jax.Array) -> Any:
    """Leaves [m, ...] with `values` at one micro-batch."""
    return jax.tree.map(lambda array, new: lax.dynamic_update_index_in_dim(array, new, number, 0), tree, values)


def _add(totals: Any, share: jax.Array | None, report: StepReport | None, gradients: Arrays) -> Any:
    """Totals with what one operation gives; a report names the routers of its stage alone, gradients what it used."""
    loss, counted, summed, of_embedded = totals
    if share is not None and report is not None:
        loss = loss + share
        routers = {
            path: jax.tree.map(jnp.add, old, report.routers[path]) if path in report.routers else old
            for path, old in counted.routers.items()
        }
        counted = StepReport(
            routers,
            counted.nonfinite_layers + report.nonfinite_layers,
            counted.indexer_loss + report.indexer_loss,
        )
    added = {path: summed[path] + gradient.astype(summed[path].dtype) for path, gradient in gradients.items()}
    return loss, counted, summed | added, of_embedded


class _Stages:
    """The stages of a model: which layers and parameters each has, what it gets, and how it runs."""

    def __init__(self, model: ModelConfig):
        self.model = model
        self.layers = stage_layers(model)
        self.last = len(self.layers) - 1
        self.first_layers = np.array([layers.start for layers in self.layers], np.int32)
        # Sums of finished residual blocks before a stage: those of blocks that began before its first layer.
        self.num_frozen = [
            -(-layers.start // block_layers(model)) if model.residual == "attention" else 0 for layers in self.layers
        ]

    def needs(self, stage: int, number: int) -> bool:
        """Whether a stage wants array `number` of a message: the running sum, then the frozen sums in order."""
        return number <= self.num_frozen[stage]

    def message(self, rows: Batch) -> Message:
        """Zeros of the shapes that travel."""
        model = self.model
        streams = (model.hyper_connections.num_streams,) if model.residual == "hyper" else ()
        zeros = jnp.zeros((*rows.tokens.shape, *streams, model.width), model.compute_dtype)
        return (make_varying(zeros, WORK_AXES),) * (1 + max(self.num_frozen))

    def pattern(self, stage: int) -> tuple:
        """Stages with equal patterns run the same program."""
        layers, devices = self.layers[stage], num_devices(self.model)

        def slot(layer: int) -> LayerAddress:
            address = layer_address(self.model, layer)
            number = list(slots_of_kinds(self.model).values())[address.segment]
            return address._replace(repeat=address.repeat - stage % devices * number)

        return (
            stage == 0,
            stage == self.last,
            self.num_frozen[stage],
            tuple(slot(layer) for layer in layers),
            tuple((s.kinds, s.num_repeats, block_starts(self.model, s).tobytes()) for s in self._segments(stage)),
        )

    def _segments(self, stage: int) -> tuple[Segment, ...]:
        return plan_segments(self.model, self.layers[stage].start, self.layers[stage].stop)

    def uses(self, stage: int, path: str) -> bool:
        """Whether the parameter at `path` takes part in a stage."""
        if path.startswith("decoder.segments."):
            return int(path.split(".")[2]) in {layer_address(self.model, n).segment for n in self.layers[stage]}
        if path.startswith("decoder.embedding"):
            return stage == 0 or (stage == self.last and self.model.tied_head)
        return stage == (self.last if path.startswith("decoder.") else 0)

    def is_edge(self, path: str) -> bool:
        """Whether the parameter at `path` belongs to a tower or the embedding."""
        return path.startswith("decoder.embedding") or not path.startswith("decoder.")

    def embed_share(self, model: MultimodalModel, micro_batches: Batch) -> Any:
        """Embeddings with features, and additions if there are any, of all micro-batches: leaves [m, ...].

        Each device of the pipe axis makes its share of them and gathers the others'. Gradients go the same way back.
        """
        share = micro_batches.tokens.shape[0] // lax.axis_size(PIPE)
        start = lax.axis_index(PIPE) * share
        own = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, share), micro_batches)
        embed = jax.checkpoint(lambda rows: model.with_features(model.decoder.embed(rows.tokens), rows))
        _, parts = lax.scan(lambda _, rows: (None, embed(rows)), None, own)
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, PIPE, tiled=True), parts)

    def run(
        self, model: MultimodalModel, stage: int, message: Message, rows: Batch, first: Any = None
    ) -> tuple[Message, tuple[tuple[LayerRecord, ...], ...]]:
        """(what goes to the next stage, records); the last stage gives the normed hidden values instead.

        `first` is what `embed_share` gives of these rows; without it the first stage embeds them itself.
        """
        decoder, additions = model.decoder, None
        running_sum, *frozen = message[: 1 + self.num_frozen[stage]]
        if stage == 0:
            embeddings, additions = first or model.with_features(decoder.embed(rows.tokens), rows)
            running_sum = decoder.begin(embeddings)
        running_sum, blocks, records = decoder.run_segments(
            decoder.stage(stage),
            running_sum,
            tuple(frozen),
            rows.segment_ids,
            model.positions(rows),
            additions=additions,
        )
        if stage == self.last:
            return (decoder.finish(running_sum, blocks),), records
        return (running_sum, *blocks), records

    def report(self, stage: int, records: tuple[tuple[LayerRecord, ...], ...], first_layer: jax.Array) -> StepReport:
        """What a stage counted: routers by path with the layers in their slots, flags at the numbers of its layers."""
        routers: dict[str, Any] = {}
        indexer_loss = jnp.zeros((), at_least_float32(self.model.compute_dtype))
        flags = []
        slots = list(slots_of_kinds(self.model).values())
        for segment, segment_records in zip(self._segments(stage), records, strict=True):
            for position, record in enumerate(segment_records):
                address = layer_address(self.model, segment.first_layer + position)
                start = address.repeat - stage % num_devices(self.model) * slots[address.segment]
                step, kind = segment.kinds.count(segment.kinds[position]), address.segment
                places = start + step * np.arange(segment.num_repeats)
                if record.router is not None:
                    path = f"decoder.segments.{kind}.layers.0.mlp"
                    routers[path] = self._placed(record.router, places, slots[kind], routers.get(path))
                indexer_loss += jnp.sum(record.indexer_loss)
            flags.append(jnp.stack([~record.is_finite for record in segment_records], axis=1).reshape(-1))
        nonfinite = jnp.concatenate(flags).astype(jnp.int32)
        everywhere = varying_like(jnp.zeros((self.model.num_layers,), jnp.int32), nonfinite)
        report = StepReport(
            routers, lax.dynamic_update_slice_in_dim(everywhere, nonfinite, first_layer, 0), indexer_loss
        )
        return make_varying(report, WORK_AXES)

    def _placed(self, layers: Any, places: np.ndarray, num_slots: int, others: Any) -> Any:
        """Leaves [repeats, ...] at `places` of [slots, ...], added to `others`."""

        def place(leaf: jax.Array) -> jax.Array:
            zeros = varying_like(jnp.zeros((num_slots, *leaf.shape[1:]), leaf.dtype), leaf)
            return zeros.at[places].set(leaf)

        placed = jax.tree.map(place, layers)
        return placed if others is None else jax.tree.map(jnp.add, others, placed)

    def empty_report(self, report_of: Callable[[int, Work], StepReport], message: Message) -> StepReport:
        """A report of nothing, with the routers of all stages."""
        number = lax.axis_index(PIPE) * 0
        firsts = {self.pattern(stage): stage for stage in reversed(range(len(self.layers)))}
        reports = [
            jax.eval_shape(functools.partial(report_of, stage), Work(message, message, number, number))
            for stage in firsts.values()
        ]
        routers = {path: shape for report in reports for path, shape in report.routers.items()}
        shapes = reports[0]._replace(routers=routers)
        return make_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), WORK_AXES)
