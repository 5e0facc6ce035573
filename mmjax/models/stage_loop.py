"""The layers of any pipeline stage as one loop whose turns run one layer each, by the body of its kind.

All stages are the same program then, told by a table what layers they have. A body of each kind of layer is compiled,
however many stages there are and in whatever order their layers follow each other.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mmjax.axes import PIPE
from mmjax.config import ModelConfig
from mmjax.models.conditional import Pullback, real_leaves, without_known, zeros_of
from mmjax.models.decoder import Decoder, LayerRecord, is_trained, kept_results
from mmjax.models.layout import block_layers, layer_address, num_devices, slots_of_kinds, stage_layers
from mmjax.parallel.conditions import run_once
from mmjax.parallel.fsdp import varying_like

Sums = tuple[jax.Array, ...]


class Turn(NamedTuple):
    """What a stage does in one turn; in a table of them arrays [stages, turns], of one stage [turns]."""

    kind: Any
    """Number of the layer's kind, which is that of its stack; -1: nothing, the stage has no more layers."""
    slot: Any
    """The layer's place in this device's part of the stack."""
    place: Any
    """Its number among the layers of its kind in this stage."""
    num_before: Any
    """Sums of residual blocks that were finished before the one that this layer goes on with, or that ends with it."""
    begins: Any
    """bool: whether the layer begins a residual block."""


class StageTable(NamedTuple):
    """The turns of all stages."""

    turns: Turn
    num_places: tuple[int, ...]
    """Of each kind: the most layers that a stage has of it."""
    layer_of_slot: tuple[np.ndarray, ...]
    """Of each kind, [stages, slots]: the model's layer in each slot that a stage uses, the number of layers if none."""
    can_begin: tuple[bool, ...]
    """Of each kind: whether one of its layers begins a residual block."""


def num_sums(model: ModelConfig) -> int:
    """Sums of residual blocks that are finished behind the last layer."""
    return -(-model.num_layers // block_layers(model)) if model.residual == "attention" else 0


@functools.cache
def stage_table(model: ModelConfig) -> StageTable:
    stages, slots, size = stage_layers(model), list(slots_of_kinds(model).values()), block_layers(model)
    shape = (len(stages), max(map(len, stages)))
    turns = Turn(*(np.full(shape, -1 if name == "kind" else 0, np.int32) for name in Turn._fields))
    turns = turns._replace(begins=turns.begins.astype(bool))
    layer_of_slot = tuple(np.full((len(stages), number), model.num_layers, np.int32) for number in slots)
    num_places, can_begin = [0] * len(slots), [False] * len(slots)
    for stage, layers in enumerate(stages):
        places = [0] * len(slots)
        for number, layer in enumerate(layers):
            address = layer_address(model, layer)
            kind, slot = address.segment, address.repeat - stage % num_devices(model) * slots[address.segment]
            begins = model.residual == "attention" and layer % size == 0
            one = Turn(kind, slot, places[kind], -(-layer // size), begins)
            for column, value in zip(turns, one, strict=True):
                column[stage, number] = value
            layer_of_slot[kind][stage, slot] = layer
            places[kind] += 1
            can_begin[kind] |= begins
        num_places = [max(pair) for pair in zip(num_places, places, strict=True)]
    return StageTable(turns, tuple(num_places), layer_of_slot, tuple(can_begin))


class KeptStage(NamedTuple):
    """What a stage's forward pass leaves for its backward pass, of one micro-batch."""

    layers: tuple
    """Of each kind, for each of its places: a layer's input, decisions, and what else is not computed again."""
    running_sum: jax.Array
    """Behind the last layer."""
    sums: Sums


class StageLayers:
    """The layers of any stage, forward and, from what the forward pass kept, backward.

    A stage is told by its number, an int32 scalar. `places` are segment ids and positions. `sums` are the `num_sums`
    sums of residual blocks, of which those take part that are finished. Inside `shard_map`.
    """

    def __init__(self, model: ModelConfig):
        self.model, self.table = model, stage_table(model)
        self._kinds = range(len(self.table.num_places))
        self._has_sums = model.residual == "attention"
        self._pullbacks: dict[int, Pullback] = {}
        self._records: tuple = ()

    def forward(
        self, decoder: Decoder, stage: jax.Array, running_sum: jax.Array, sums: Sums, places: tuple
    ) -> tuple[tuple[LayerRecord, ...], KeptStage]:
        """The records of each kind, with a leading axis of slots that are zero where the stage has no layer, and what
        is kept, the results among it."""
        trained, others, run_kinds = self._split(decoder)
        shared = self._turns(stage), places

        def empty(kind: int) -> tuple:
            def results(trained: Any, others: Any, running_sum: jax.Array, sums: Sums, shared: tuple) -> tuple:
                (turns, places), layer = shared, _at((trained, others), shared[0].slot[0])
                return run_kinds[kind](*layer, running_sum, sums, (_at(turns, 0), places))[1]

            record, kept = jax.eval_shape(results, trained[kind], others[kind], running_sum, sums, shared)
            # Even constants vary over the stages once they lie in a layer's place.
            zeros = functools.partial(zeros_of, mesh_axes=(PIPE,))
            num_slots = self.table.layer_of_slot[kind].shape[1]
            return zeros(record, (num_slots,)), zeros(kept, (self.table.num_places[kind],))

        def one_turn(carry: tuple, turn: Turn) -> tuple[tuple, None]:
            running_sum, sums, results = carry
            running_sum, sums = self._begin(running_sum, sums, turn)
            results = list(results)
            for kind in self._kinds:

                def one(old: tuple, held: tuple, kind: int = kind) -> tuple:
                    running_sum, (records, kept) = old
                    turn, sums, places = held
                    layer = _at((trained[kind], others[kind]), turn.slot)
                    running_sum, (record, more) = run_kinds[kind](*layer, running_sum, sums, (turn, places))
                    return running_sum, (_put(records, record, turn.slot), _put(kept, more, turn.place))

                state, held = (running_sum, results[kind]), (turn, sums, places)
                running_sum, results[kind] = self._once(turn, kind, one, state, held)
            return (running_sum, sums, results), None

        state = running_sum, sums, [empty(kind) for kind in self._kinds]
        (running_sum, sums, results), _ = lax.scan(one_turn, state, shared[0])
        records, kept = zip(*results, strict=True)
        self._records = jax.tree.map(jax.typeof, records)
        return records, KeptStage(kept, running_sum, sums)

    def replay(
        self,
        decoder: Decoder,
        stage: jax.Array,
        running_sum: jax.Array,
        sums: Sums,
        places: tuple,
        kept: KeptStage,
        wants_weights: bool,
    ) -> tuple[jax.Array, Sums, tuple[LayerRecord, ...]]:
        """What `forward`, traced before, gave with these arguments and kept, so that it has gradients; records are
        zeros. The gradients are those of the layers written one after the other, without `wants_weights` of no array
        of the decoder: the loop would make them whether or not anything uses them."""
        trained, others, _ = self._split(decoder)

        @jax.custom_vjp
        def run(trained: tuple, others: tuple, running_sum: jax.Array, sums: Sums, shared: tuple, kept: KeptStage):
            return kept.running_sum, kept.sums, zeros_of(self._records)

        def keep(trained: tuple, others: tuple, running_sum: jax.Array, sums: Sums, shared: tuple, kept: KeptStage):
            return run(trained, others, running_sum, sums, shared, kept), (trained, others, shared, kept)

        run.defvjp(keep, functools.partial(self._backward, wants_weights))
        return run(trained, others, running_sum, sums, (self._turns(stage), places), kept)

    def _backward(self, wants_weights: bool, saved: tuple, gradients: tuple) -> tuple:
        trained, others, (turns, places), kept = saved
        of_running, of_sums, of_records = gradients
        of_records = tuple(map(real_leaves, of_records))

        def one_turn(carry: tuple, turn: Turn) -> tuple[tuple, None]:
            of_running, of_sums, of_trained = carry
            of_trained = list(of_trained)
            for kind in self._kinds:

                def one(old: tuple, held: tuple, kind: int = kind) -> tuple:
                    of_running, of_sums, of_stack = old
                    turn, sums, places, kept, of_records = held
                    known = *_at((trained[kind], others[kind]), turn.slot), sums, (turn, places)
                    of_layer = of_running, _at(of_records, turn.slot)
                    found = self._pullbacks[kind].call(known, _at(kept, turn.place), of_layer)
                    of_weights, of_running, of_mixed = found
                    of_sums = jax.tree.map(jnp.add, of_sums, of_mixed)
                    return of_running, of_sums, _put(of_stack, of_weights, turn.slot) if wants_weights else None

                held = turn, kept.sums, places, kept.layers[kind], of_records[kind]
                state = of_running, of_sums, of_trained[kind]
                of_running, of_sums, of_trained[kind] = self._once(turn, kind, one, state, held)
            return (self._end(of_running, of_sums, turn), of_sums, of_trained), None

        nothing = [None] * len(trained)
        if wants_weights:
            nothing = jax.tree.map(lambda leaf: varying_like(jnp.zeros_like(leaf), leaf), list(trained))
        state = of_running, of_sums, nothing
        (of_running, of_sums, of_trained), _ = lax.scan(one_turn, state, turns, reverse=True)
        return tuple(of_trained), None, of_running, of_sums, None, None

    def _split(self, decoder: Decoder) -> tuple[tuple, tuple, list]:
        """Trained and other arrays of each kind's stack; and how a layer of each kind runs, giving besides the running
        sum its record and what its backward pass takes that is not known then."""
        stacks = [nnx.split(stack.layers[0], is_trained, ...) for stack in decoder.segments]
        graphs, trained, others = zip(*stacks, strict=True)

        def run_layer(kind: int, trained: Any, others: Any, running_sum: jax.Array, sums: Sums, shared: tuple):
            def apply(trained: Any, others: Any, running_sum: jax.Array, sums: Sums, shared: tuple):
                turn, places = shared
                # What is not finished takes no part, the running sum of a block that begins with this layer neither.
                is_live = ~turn.begins if self.table.can_begin[kind] else True
                num_finished = turn.num_before + turn.begins.astype(jnp.int32) if self._has_sums else None
                layer = nnx.merge(graphs[kind], trained, others)
                options = {"is_live": is_live, "num_finished": num_finished, "keep_hidden": False}
                return layer(running_sum, sums, *places, **options)

            if self.model.remat == "layer":
                apply = jax.checkpoint(apply, policy=kept_results(self.model), prevent_cse=False)
            return apply(trained, others, running_sum, sums, shared)

        def run_and_keep(kind: int, trained: Any, others: Any, running_sum: jax.Array, sums: Sums, shared: tuple):
            def differentiated(trained: Any, running_sum: jax.Array, sums: Sums):
                running_sum, record = run_layer(kind, trained, others, running_sum, sums, shared)
                return (running_sum, real_leaves(record)), record

            (running_sum, _), pullback, record = jax.vjp(differentiated, trained, running_sum, sums, has_aux=True)
            self._pullbacks[kind], kept = without_known(pullback, (trained, others, sums, shared))
            return running_sum, (record, kept)

        # Jitted so that a layer is traced once, for the shapes of its results and for the loop.
        return trained, others, [jax.jit(functools.partial(run_and_keep, kind)) for kind in self._kinds]

    def _turns(self, stage: jax.Array) -> Turn:
        return jax.tree.map(lambda rows: _at(jnp.asarray(rows), stage), self.table.turns)

    def _once(self, turn: Turn, kind: int, operate: Callable, state: tuple, held: tuple) -> tuple:
        """`operate` in the turns of layers of a kind."""
        kinds = self.table.turns.kind
        return run_once(turn.kind == kind, operate, state, held, (int((kinds == kind).sum()), kinds.size))

    def _begin(self, running_sum: jax.Array, sums: Sums, turn: Turn) -> tuple[jax.Array, Sums]:
        """Where a block begins, what has run so far is the sum of the block before."""
        if not self._has_sums:
            return running_sum, sums

        def begin(old: tuple, turn: Turn) -> tuple:
            running_sum, sums = old
            new = [jnp.where(turn.num_before == number, running_sum, leaf) for number, leaf in enumerate(sums)]
            return jnp.zeros_like(running_sum), tuple(new)

        return run_once(turn.begins, begin, (running_sum, sums), turn, self._share_of_begins())

    def _end(self, of_running: jax.Array, of_sums: Sums, turn: Turn) -> jax.Array:
        """The way back: the gradient of the sum that a block began with."""
        if not self._has_sums:
            return of_running

        def end(of_running: jax.Array, held: tuple) -> jax.Array:
            turn, of_sums = held
            picked = [jnp.where(turn.num_before == number, leaf, 0) for number, leaf in enumerate(of_sums)]
            return functools.reduce(jnp.add, picked)

        return run_once(turn.begins, end, of_running, (turn, of_sums), self._share_of_begins())

    def _share_of_begins(self) -> tuple[int, int]:
        begins = self.table.turns.begins
        return int(begins.sum()), begins.size


def _at(tree: Any, number: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree)


def _put(tree: Any, values: Any, number: jax.Array) -> Any:
    return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, number, 0), tree, values)
