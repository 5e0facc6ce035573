"""The loss of one micro-batch, and what a step counts on the way."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.axes import DATA_AXES, TENSOR
from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.models.decoder import LayerRecord
from mmjax.models.layers import at_least_float32
from mmjax.models.moe import RouterStatistics
from mmjax.models.multimodal import MultimodalModel
from pallas_kernels.cross_entropy.api import cross_entropy


class StepReport(NamedTuple):
    """What the forward passes of a step counted; adds up over micro-batches and devices."""

    routers: dict[str, RouterStatistics]
    """By the path of the layer's MLP; leaves with a leading repeats axis."""
    nonfinite_layers: jax.Array
    """[num_layers] int32: on how many devices, in how many micro-batches, the layer's running sum was not finite."""
    indexer_loss: jax.Array
    """Sum over layers and tokens of the indexer's KL."""


def micro_batch_loss(
    model: MultimodalModel, batch: Batch, counts: dict[str, jax.Array]
) -> tuple[jax.Array, StepReport]:
    """The loss's share of one micro-batch, summed over the mesh, and what this device counted."""
    hidden, records = model(batch)
    report = make_report(model.model, records)
    share = token_share(model, hidden, batch, counts) + auxiliary_share(model.model, report, counts)
    return lax.psum(share, DATA_AXES), jax.tree.map(lax.stop_gradient, report)


def token_share(model: MultimodalModel, hidden: jax.Array, batch: Batch, counts: dict[str, jax.Array]) -> jax.Array:
    """This device's share of the cross-entropy's mean."""
    wide = at_least_float32(hidden.dtype)
    # Divided here, not the loss: its gradients, made together with it, then need no scaling of their own.
    weights = batch.loss_weight.astype(wide) / jnp.maximum(counts["supervised_tokens"], 1).astype(wide)
    return cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        model.decoder.head_weights(hidden.dtype),
        batch.targets.reshape(-1),
        weights.reshape(-1),
        chunk_tokens=model.model.loss_chunk_tokens,
        vocabulary_axis=TENSOR,
        is_head_trained=model.decoder.is_head_trained,
    )


def auxiliary_share(model: ModelConfig, report: StepReport, counts: dict[str, jax.Array]) -> jax.Array:
    """This device's share of the losses that the layers of `report` add."""
    router, losses = model.moe.router, router_losses(model, report.routers)
    share = model.full_attention.indexer.loss_coefficient * report.indexer_loss
    share += router.balance_coefficient * losses["balance_loss"] + router.z_coefficient * losses["router_z_loss"]
    return share / jnp.maximum(counts["real_tokens"], 1).astype(share.dtype)


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


def router_losses(model: ModelConfig, routers: dict[str, RouterStatistics]) -> dict[str, jax.Array]:
    """Each loss of the routers by the name of its metric, summed over layers and tokens."""
    nothing = jnp.zeros((), at_least_float32(model.compute_dtype))
    return {
        "balance_loss": sum((jnp.sum(router.balance_loss) for router in routers.values()), nothing),
        "router_z_loss": sum((jnp.sum(router.z_loss) for router in routers.values()), nothing),
    }
