"""A plan for each modality branch of a model on a mesh: how its tower's work is shared, by predicted time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmjax import axes
from mmjax.config import RunConfig, VisionConfig
from mmjax.config.model_settings import AudioConfig
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import FULL, Tuning, trained_arrays
from mmjax.planner.collectives import Group, all_gather_seconds, all_reduce_seconds, mesh_group, send_seconds
from mmjax.planner.compute_time import PEER_SHARES, Rates
from mmjax.planner.cost import Branch, audio_training_flops, forward_flops, training_flops, vision_training_flops
from mmjax.planner.hardware import Cluster
from mmjax.planner.parameters import ITEM_BYTES

Share = Literal[
    "whole on each",
    "data parallel",
    "pipelined",
    "embedding split",
    "positions split",
    "patches split",
    "frames split",
]
# What the trainer does today, and the setting that asks for it.
_SETTINGS: dict[Share, str] = {
    "whole on each": "as it is",
    "data parallel": "training.pipeline_edges=data_parallel (over pipe)",
    "pipelined": "training.pipeline_edges=first_stage",
    "embedding split": "mesh.tensor (decoder)",
    "positions split": "mesh.context (decoder)",
}


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What a step's data holds, and how sure its measured rates are."""

    text_tokens: float
    """Positions of a step, over all devices, placeholders included."""
    patches: float = 0.0
    clips: float = 0.0
    confidence: Mapping[str, float] = field(default_factory=dict)
    """By branch (text, vision, audio), from 0 (take published rates) to 1 (take measured ones); 0 where not said."""

    def __post_init__(self) -> None:
        amounts = (self.text_tokens, self.patches, self.clips)
        if min(amounts) < 0 or sum(amounts) <= 0 or any(not 0 <= one <= 1 for one in self.confidence.values()):
            raise ConfigurationError(
                "mix of modalities",
                found=f"{amounts} tokens, patches and clips, confidence {dict(self.confidence)}",
                expected="amounts of at least 0, not all 0, and confidences from 0 to 1",
                remedy="count a step's tokens, patches and clips",
            )


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to share a branch's work, forward and backward, in seconds of a step."""

    share: Share
    compute: float
    exchange: float
    """Of activations, features or keys and values."""
    exchanged_bytes: float
    """Of a device, in a step."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange

    @property
    def setting(self) -> str:
        """What asks the trainer for it; empty where it cannot do this yet."""
        return _SETTINGS.get(self.share, "")


@dataclass(frozen=True, kw_only=True)
class BranchPlan:
    """All options of a branch, the fastest first."""

    name: str
    flops: float
    """Forward and backward of a step, over all devices."""
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def best_built(self) -> Option:
        """The fastest that the trainer can do."""
        return next(option for option in self.options if option.setting)


class BranchPlanner:
    """Plans each branch of a run on its mesh, and plans again when the data or what is known of it has changed.

    A branch's tower works for the rows of the devices that hold one shard of the batch: those of the axes tensor,
    context and pipe together. They may all do the same, or share the pictures, their patches, the heads, or the layers.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        *,
        tuning: Tuning = FULL,
        measured: Rates | None = None,
        threshold: float = 0.1,
    ):
        """`measured` are rates that the confidences of a mix weigh against the published ones.

        A changed share of the branches' FLOPs, or a changed confidence, counts from `threshold` on.
        """
        if not 0 < threshold < 1:
            raise ConfigurationError(
                "threshold", found=f"{threshold:g}", expected="a share between 0 and 1", remedy="give one such as 0.1"
            )
        self.config, self.cluster, self.tuning, self.threshold = config, cluster, tuning, threshold
        self.measured = measured or Rates()
        self._planned_for: Mix | None = None

    def plan(self, mix: Mix) -> tuple[BranchPlan, ...]:
        """The branches that the model and the mix have: text first, then vision and audio."""
        self._planned_for = mix
        plans = [BranchPlan(name="text", flops=self._flops(mix)["text"], options=_sorted(self._text(mix)))]
        flops = self._flops(mix)
        if flops.get("vision"):
            plans.append(BranchPlan(name="vision", flops=flops["vision"], options=_sorted(self._vision(mix))))
        if flops.get("audio"):
            plans.append(BranchPlan(name="audio", flops=flops["audio"], options=_sorted(self._audio(mix))))
        return tuple(plans)

    def update(self, mix: Mix) -> tuple[BranchPlan, ...] | None:
        """A new plan if `mix` differs from that of the last one past the threshold; else None.

        Mixes differ by half the sum of changes in the branches' shares of all FLOPs, or by a branch's confidence.
        """
        if self._planned_for is not None and self.change(self._planned_for, mix) < self.threshold:
            return None
        return self.plan(mix)

    def change(self, before: Mix, after: Mix) -> float:
        """How much two mixes differ, from 0 to 1."""
        shares = []
        for mix in (before, after):
            flops = self._flops(mix)
            shares.append({name: flops[name] / sum(flops.values()) for name in flops})
        moved = sum(abs(shares[0].get(name, 0) - shares[1].get(name, 0)) for name in shares[0] | shares[1]) / 2
        names = set(before.confidence) | set(after.confidence)
        sure = [abs(before.confidence.get(name, 0.0) - after.confidence.get(name, 0.0)) for name in names]
        return max([moved, *sure])

    def golden_branches(self, plans: Sequence[BranchPlan]) -> list[Branch]:
        """The terms of the golden formula of each branch's best option: gradients over the data axes, forward and
        backward FLOPs."""
        data = self._group(axes.DATA_AXES)
        bandwidth = (data.between if data.crosses_nodes else data.inside).bandwidth
        gradients: dict[str, float] = defaultdict(float)
        for array in trained_arrays(self.config.model, self.tuning):
            if array.is_trained:
                part = array.adapted_part or array.part
                gradients[_BRANCHES.get(part, "text")] += array.size * ITEM_BYTES[array.dtype]
        return [
            Branch(
                name=plan.name,
                forward_flops=plan.flops,
                flops_per_second=plan.flops / plan.best.compute,
                # Of a device, once a step: what it does not hold split.
                exchanged_bytes=gradients[plan.name] / (self.config.mesh.fsdp * self.config.mesh.expert),
                bandwidth=bandwidth,
                communication_seconds=plan.best.exchange,
            )
            for plan in plans
        ]

    def _flops(self, mix: Mix) -> dict[str, float]:
        model, data = self.config.model, self.config.data
        text = sum(training_flops(model, data.row_tokens, self.tuning).values()) * mix.text_tokens
        patches = min(data.image_max_patches, max(1, data.row_patches))
        found = {"text": text}
        if model.vision.is_present and mix.patches:
            found["vision"] = vision_training_flops(model, patches, self.tuning) * mix.patches
        if model.audio.is_present and mix.clips:
            found["audio"] = audio_training_flops(model, self.tuning) * mix.clips
        return found

    def _rate(self, branch: str, part: str, mix: Mix) -> float:
        """FLOP/s of a device: the published share of its peak, or as far as the mix is sure the measured one."""
        sure = mix.confidence.get(branch, 0.0)
        share = sure * self.measured.shares[part] + (1 - sure) * PEER_SHARES[part]
        return share * self.cluster.gpu.flops_per_second

    def _group(self, mesh_axes: tuple[str, ...]) -> Group:
        return mesh_group(self.config.mesh, mesh_axes, self.cluster)

    def _together(self) -> Group:
        """The devices that work for one shard of the rows."""
        return self._group((axes.PIPE, axes.CONTEXT, axes.TENSOR))

    def _vision(self, mix: Mix) -> list[Option]:
        config, group = self.config, self._together()
        vision = config.model.vision
        micro_batches, shards = config.training.accumulation, config.mesh.num_row_shards
        patches = mix.patches / shards
        pictures = patches / max(1, min(config.data.image_max_patches, config.data.row_patches))
        # A tower without layers has nothing to split but its patches.
        seconds = self._flops(mix)["vision"] / shards / self._rate("vision", "vision", mix)
        features = patches / vision.patches_per_feature * config.model.width
        return self._tower(vision, seconds, patches, features, pictures, micro_batches, group, sequence="patches split")

    def _audio(self, mix: Mix) -> list[Option]:
        config, group = self.config, self._together()
        audio, shards = config.model.audio, config.mesh.num_row_shards
        clips = mix.clips / shards
        seconds = self._flops(mix)["audio"] / shards / self._rate("audio", "vision", mix)
        values, features = clips * audio.clip_values, clips * audio.clip_features * config.model.width
        micro_batches = config.training.accumulation
        return self._tower(audio, seconds, values, features, clips, micro_batches, group, sequence="frames split")

    def _tower(
        self,
        tower: VisionConfig | AudioConfig,
        seconds: float,
        values: float,
        features: float,
        samples: float,
        micro_batches: int,
        group: Group,
        sequence: Share,
    ) -> list[Option]:
        """Options of a tower that works on `values` positions of `samples` pictures or clips, for n devices.

        whole on each     all of it, on each of the n
        data parallel     ceil(samples / n) of them each; features gathered, their gradients scattered
        sequence split    1 / n of the positions; keys and values of every layer gathered, there and back
        embedding split   1 / n of the heads and hidden values; two sums of all positions a layer, there and back
        pipelined         1 / p of the layers on each stage: inputs passed on, there and back
        """
        item, number = ITEM_BYTES[self.config.model.compute_dtype], group.num_devices
        options = [Option(share="whole on each", compute=seconds, exchange=0.0, exchanged_bytes=0.0)]
        if number == 1:
            return options
        samples_each = max(samples, 1.0) / micro_batches
        uneven = max(1.0, -(-samples_each // number) * number / samples_each) if samples_each >= 1 else number
        feature_bytes = 2 * features * item
        options.append(
            Option(
                share="data parallel",
                compute=seconds * min(number, uneven) / number,
                exchange=micro_batches * all_gather_seconds(feature_bytes / micro_batches, group),
                exchanged_bytes=feature_bytes,
            )
        )
        if tower.num_layers:
            stream = values / micro_batches * tower.width * item
            sequence_bytes = 2 * 2 * stream
            calls = micro_batches * tower.num_layers
            options.append(
                Option(
                    share=sequence,
                    compute=seconds / number,
                    exchange=calls * all_gather_seconds(sequence_bytes, group)
                    + micro_batches * all_gather_seconds(feature_bytes / micro_batches, group),
                    exchanged_bytes=calls * sequence_bytes + feature_bytes,
                )
            )
            if tower.num_heads % number == 0:
                options.append(
                    Option(
                        share="embedding split",
                        compute=seconds / number,
                        exchange=calls * 4 * all_reduce_seconds(stream, group),
                        exchanged_bytes=calls * 4 * 2 * stream,
                    )
                )
            if self.config.mesh.pipe > 1:
                pipe = self._group((axes.PIPE,))
                link = pipe.between if pipe.crosses_nodes else pipe.inside
                ticks = 2 * (micro_batches + pipe.num_devices - 1)
                options.append(
                    Option(
                        share="pipelined",
                        compute=seconds / pipe.num_devices * (1 + (pipe.num_devices - 1) / micro_batches),
                        exchange=ticks * send_seconds(stream, link),
                        exchanged_bytes=ticks * stream,
                    )
                )
        return options

    def _text(self, mix: Mix) -> list[Option]:
        """The decoder's work of one shard of rows on the devices of tensor and context: heads and hidden values split,
        or positions.

            embedding split   two sums of all positions a layer, there and back
            positions split   what keys and values are made of, gathered in each layer, there and back
        """
        config, model = self.config, self.config.model
        group, item = self._group((axes.CONTEXT, axes.TENSOR)), ITEM_BYTES[config.model.compute_dtype]
        number, layers = group.num_devices, model.num_layers / config.mesh.pipe
        micro_batches = config.training.accumulation
        tokens = mix.text_tokens / config.mesh.num_row_shards / micro_batches
        seconds = sum(
            (training_flops(model, config.data.row_tokens, self.tuning)[part])
            / self._rate("text", part if part in PEER_SHARES else "head", mix)
            for part, flops in forward_flops(model, config.data.row_tokens).items()
            if flops
        )
        seconds *= mix.text_tokens / config.mesh.num_row_shards / config.mesh.pipe
        if number == 1:
            return [Option(share="whole on each", compute=seconds, exchange=0.0, exchanged_bytes=0.0)]
        calls, stream = micro_batches * layers, tokens * model.width * item
        full, grouped = model.full_attention, model.grouped_attention
        made_of = full.latent_width + full.shared_key_width
        if model.full_attention_kind == "grouped":
            made_of = 2 * grouped.num_key_heads * grouped.head_width
        keys = 2 * tokens * made_of * item
        return [
            Option(
                share="embedding split",
                compute=seconds / number,
                exchange=calls * 4 * all_reduce_seconds(stream, group),
                exchanged_bytes=calls * 4 * 2 * stream,
            ),
            Option(
                share="positions split",
                compute=seconds / number,
                exchange=calls * all_gather_seconds(keys, group),
                exchanged_bytes=calls * keys,
            ),
        ]


# Parts of the model that belong to the text branch are not here. A projector is taken for that of the pictures.
_BRANCHES = {"vision": "vision", "projector": "vision", "audio": "audio"}


def _sorted(options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(sorted(options, key=lambda option: (option.total, option.exchanged_bytes)))
