"""What the stages of a pipeline are: which layers and parameters each has, what it gets, and how it runs."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import DATA_AXES, PIPE
from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.models.conditional import run_where, zeros_of
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
from mmjax.models.multimodal import Arrays, MultimodalModel
from mmjax.models.stage_loop import KeptStage, StageLayers, num_sums, stage_table
from mmjax.parallel.fsdp import make_varying, varying_like
from mmjax.parallel.pipeline import Message, Work
from mmjax.planner.memory import keeps_layers
from mmjax.training.loss import StepReport, auxiliary_share, token_share

# Mesh axes over which the work of a step differs.
WORK_AXES = (*DATA_AXES, PIPE)

Assemble = Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], MultimodalModel]
"""The model, with these trained and these frozen arrays in place of its own."""


def stages_of(model: ModelConfig) -> "Stages":
    """Each stage a program of its own, or with loops over all layers one program for all of them."""
    return UniformStages(model) if keeps_layers(model) else Stages(model)


class Stages:
    """The stages of a model: which layers and parameters each has, what it gets, and how it runs."""

    runs_again = True
    """A stage keeps its input alone, from which it runs again before it goes backward."""

    def __init__(self, model: ModelConfig):
        self.model = model
        self.layers = stage_layers(model)
        self.last = len(self.layers) - 1
        self.first_layers = np.array([layers.start for layers in self.layers], np.int32)
        # What a stage is given: the running sum, and those of residual blocks that began before its first layer.
        self.num_arrays = [
            1 + (-(-layers.start // block_layers(model)) if model.residual == "attention" else 0)
            for layers in self.layers
        ]

    def message(self, rows: Batch) -> Message:
        """Zeros of the shapes that travel."""
        model = self.model
        streams = (model.hyper_connections.num_streams,) if model.residual == "hyper" else ()
        zeros = jnp.zeros((*rows.tokens.shape, *streams, model.width), model.compute_dtype)
        return (make_varying(zeros, WORK_AXES),) * max(self.num_arrays)

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
            self.num_arrays[stage],
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

    def used(self, program: int, path: str, is_embedded: bool) -> bool:
        """Whether a program takes the parameter at `path`; `is_embedded`: what the first stage starts from is made."""
        return self.uses(program, path) and not (program == 0 and is_embedded and self.is_edge(path))

    def has_input(self, program: int) -> bool:
        return program > 0

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
        running_sum, *frozen = message[: self.num_arrays[stage]]
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

    def run_micro_batch(
        self,
        program: int,
        assemble: Assemble,
        arrays: tuple[Arrays, Arrays],
        work: Work,
        rows: Batch,
        first: Any,
        counts: dict[str, jax.Array],
    ) -> tuple[Message, jax.Array, StepReport | None, Any]:
        """What goes to the next stage, the share of the loss, what was counted and what is kept, of one micro-batch.

        `arrays` are the trained and the frozen ones. `first` is what the first stage starts from, where it does not
        make that itself.
        """
        model = assemble({}, {})
        output, records = self.run(model, program, work.input, rows, first)
        report = self.report(program, records, jnp.asarray(self.first_layers)[work.stage])
        share = auxiliary_share(self.model, report, counts)
        if program == self.last:
            hidden, output = output[0], ()
            share += token_share(model, hidden, rows, counts)
        return output, make_varying(share, WORK_AXES), report, ()

    def run_again(
        self, kept: Any, wants_weights: bool, *arguments: Any
    ) -> tuple[Message, jax.Array, StepReport | None, Any]:
        """The same for a backward pass, from what the forward pass kept. Without `wants_weights` trained arrays have no
        gradients."""
        return self.run_micro_batch(*arguments)

    def counts_backward(self, program: int) -> bool:
        """Whether a backward pass counts what it finds; else the forward pass has."""
        return program == self.last

    def placed(self, work: Work, new: Any, old: Any) -> Any:
        """What a backward pass leaves in the place of what the first stage starts from."""
        return new

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

    def empty_results(self, results_of: Callable[[int, Work], Any], message: Message) -> tuple[StepReport, Any]:
        """A report of nothing, with the routers of all stages, and what one micro-batch keeps, described."""
        number = lax.axis_index(PIPE) * 0
        firsts = {self.pattern(stage): stage for stage in reversed(range(len(self.layers)))}
        found = [
            jax.eval_shape(functools.partial(results_of, stage), Work(message, message, number, number, number))
            for stage in firsts.values()
        ]
        routers = {path: shape for report, _ in found for path, shape in report.routers.items()}
        report, kept = found[0]
        report = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), report._replace(routers=routers))
        return make_varying(report, WORK_AXES), kept

    def empty_kept(self, kept: Any, slots_of_device: Sequence[int]) -> Any:
        """Places for what micro-batches under way keep, from the description of one's."""
        return kept


class UniformStages(Stages):
    """All stages as one program, 0: a loop over layers, told by a table which they are.

    The input of each layer is kept, so that no stage runs again as a whole.
    """

    runs_again = False

    def __init__(self, model: ModelConfig):
        super().__init__(model)
        self.stage_layers = StageLayers(model)

    def pattern(self, stage: int) -> tuple:
        return ()

    def used(self, program: int, path: str, is_embedded: bool) -> bool:
        return any(super(UniformStages, self).used(stage, path, is_embedded) for stage in range(self.last + 1))

    def has_input(self, program: int) -> bool:
        return True

    def run_micro_batch(
        self,
        program: int,
        assemble: Assemble,
        arrays: tuple[Arrays, Arrays],
        work: Work,
        rows: Batch,
        first: Any,
        counts: dict[str, jax.Array],
    ) -> tuple[Message, jax.Array, StepReport | None, Any]:
        model = assemble({}, {})
        running_sum, sums = self._begin(assemble, arrays, work, rows, first)
        places = rows.segment_ids, model.positions(rows)
        records, kept = self.stage_layers.forward(model.decoder, work.stage, running_sum, sums, places)
        report = self._report_of_kinds(work.stage, records)
        share = make_varying(auxiliary_share(self.model, report, counts), WORK_AXES)
        return (kept.running_sum, *kept.sums)[: len(work.input)], share, report, kept

    def run_again(
        self,
        kept: Any,
        wants_weights: bool,
        program: int,
        assemble: Assemble,
        arrays: tuple[Arrays, Arrays],
        work: Work,
        rows: Batch,
        first: Any,
        counts: dict[str, jax.Array],
    ) -> tuple[Message, jax.Array, StepReport | None, Any]:
        """Head and loss of the last stage run here alone; the share is theirs."""
        model = assemble({}, {})
        trained, frozen = arrays
        differentiated, held = (trained, {}) if wants_weights else ({}, trained)
        running_sum, sums = self._begin(assemble, (differentiated, frozen), work, rows, first, is_again=True)
        places = rows.segment_ids, model.positions(rows)
        running_sum, sums, records = self.stage_layers.replay(
            model.decoder, work.stage, running_sum, sums, places, kept, wants_weights
        )
        # Of records that hold zeros; it has their gradients.
        share = auxiliary_share(self.model, self._report_of_kinds(work.stage, records), counts)
        share = make_varying(share, WORK_AXES)

        def finish(trained: tuple, others: tuple) -> jax.Array:
            (weights, running_sum, sums), (held, frozen, rows, counts) = trained, others
            whole = assemble(weights | held, frozen)
            hidden = whole.decoder.finish(running_sum, sums)
            return make_varying(token_share(whole, hidden, rows, counts), WORK_AXES)

        weights, held, frozen = (
            {p: a for p, a in group.items() if self._is_behind(p)} for group in (differentiated, held, frozen)
        )
        others, nothing = (held, frozen, rows, counts), varying_like(jnp.zeros_like(share), share)
        trained = weights, running_sum, sums
        share += run_where(work.stage == self.last, finish, trained, others, nothing, (1, self.last + 1))
        return (running_sum, *sums)[: len(work.input)], share, None, ()

    def counts_backward(self, program: int) -> bool:
        return True

    def empty_kept(self, kept: KeptStage, slots_of_device: Sequence[int]) -> KeptStage:
        """Of each array as many as the device keeps at one time that needs most: late stages alone have late sums."""

        def zeros(described: Any, stages: Iterable[int]) -> Any:
            number = max(slots_of_device[stage % len(slots_of_device)] for stage in stages)
            return zeros_of(described, (number,), (PIPE,))

        size = block_layers(self.model)
        with_sum = [
            [stage for stage, layers in enumerate(self.layers) if layers.stop > number * size]
            for number in range(len(kept.sums))
        ]
        return KeptStage(
            zeros(kept.layers, range(len(self.layers))),
            zeros(kept.running_sum, [self.last]),
            tuple(zeros(leaf, stages) for leaf, stages in zip(kept.sums, with_sum, strict=True)),
        )

    def placed(self, work: Work, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda leaf, kept: jnp.where(work.stage == 0, leaf, kept), new, old)

    def _begin(
        self,
        assemble: Assemble,
        arrays: tuple[Arrays, Arrays],
        work: Work,
        rows: Batch,
        first: Any,
        *,
        is_again: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The running sum before a stage's layers, and places for all sums; again for its gradients alone."""
        running_sum, *sums = work.input

        def begin(trained: Arrays, others: tuple[Arrays, Batch]) -> jax.Array:
            frozen, rows = others
            whole = assemble(trained, frozen)
            embeddings, _ = whole.with_features(whole.decoder.embed(rows.tokens), rows)
            return make_varying(whole.decoder.begin(embeddings), WORK_AXES)

        trained, frozen = ({p: a for p, a in group.items() if self.is_edge(p)} for group in arrays)
        if first is None and (trained or not is_again):
            share = 1, self.last + 1
            running_sum = run_where(work.stage == 0, begin, trained, (frozen, rows), running_sum, share)
        elif first is not None:
            running_sum = jnp.where(work.stage == 0, assemble({}, {}).decoder.begin(first[0]), running_sum)
        missing = num_sums(self.model) - len(sums)
        zeros = varying_like(jnp.zeros_like(running_sum), running_sum)
        return running_sum, (*sums, *(zeros,) * missing)

    def _is_behind(self, path: str) -> bool:
        """Whether the array at `path` takes part behind the last layer."""
        return self.uses(self.last, path) and not path.startswith("decoder.segments.")

    def _report_of_kinds(self, stage: jax.Array, records: tuple[LayerRecord, ...]) -> StepReport:
        """Records of each kind with a leading axis of slots."""
        routers = {
            f"decoder.segments.{kind}.layers.0.mlp": record.router
            for kind, record in enumerate(records)
            if record.router is not None
        }
        nonfinite = jnp.zeros((self.model.num_layers,), jnp.int32)
        indexer_loss = jnp.zeros((), at_least_float32(self.model.compute_dtype))
        for record, layers in zip(records, stage_table(self.model).layer_of_slot, strict=True):
            # Slots without a layer of this stage point behind the last one.
            nonfinite = nonfinite.at[jnp.asarray(layers)[stage]].add((~record.is_finite).astype(jnp.int32), mode="drop")
            indexer_loss += jnp.sum(record.indexer_loss)
        return make_varying(StepReport(routers, nonfinite, indexer_loss), WORK_AXES)
