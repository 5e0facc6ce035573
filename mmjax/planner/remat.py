"""Which results of layers to keep for the backward pass, and where: from bytes and the time to compute them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from mmjax.config import ModelConfig, RematResult, RunConfig, layer_kinds
from mmjax.planner.compute_time import Rates, share_again
from mmjax.planner.cost import forward_flops
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import InFlight


@dataclass(frozen=True, kw_only=True)
class KeptResult:
    """One named result of all decoder layers, of one micro-batch on one device."""

    name: RematResult
    num_bytes: float
    seconds: float
    """To compute it again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class RematPlan:
    """What `model.remat_keep` and `model.remat_offload` should be."""

    keep: tuple[RematResult, ...]
    offload: tuple[RematResult, ...]
    device_bytes: float
    host_bytes: float
    saved_seconds: float
    """Less computing in a step, before what fetching from the host may cost."""


def kept_results(config: RunConfig, cluster: Cluster, rates: Rates | None = None) -> list[KeptResult]:
    """The results that can be kept, with their costs.

    bytes    t (widths of the result, summed over layers) c          t tokens of a device, c bytes of the compute dtype
    seconds  t (FLOPs of a token that it saves) / (share of the peak * peak * tensor)
    """
    model, rates = config.model, rates or Rates()
    flight, flops = InFlight(config), forward_flops(model, config.data.row_tokens)
    tensor = config.mesh.tensor
    results = []
    for name in get_args(RematResult):
        width = sum(_widths(model, mixer, mlp, tensor)[name] for mixer, mlp in layer_kinds(model))
        peak = cluster.gpu.flops_per_second * tensor
        seconds = sum(
            number * (share_again(config, part, ()) - share_again(config, part, (name,))) / (rates.shares[part] * peak)
            for part, number in flops.items()
        )
        num_bytes = flight.tokens * width * flight.compute
        results.append(KeptResult(name=name, num_bytes=num_bytes, seconds=flight.tokens * seconds))
    return results


def choose_results(
    results: Sequence[KeptResult], *, device_bytes: float, host_bytes: float, host_bandwidth: float, overlap: float
) -> RematPlan:
    """Keep what saves most time for its bytes: on the device while there is room, then on the host.

    A result goes to the host only if its way there and back, of which computing hides the share `overlap`, takes less
    time than computing it again:  2 bytes / host_bandwidth * (1 - overlap) < seconds.
    """
    keep, offload, saved, on_device, on_host = [], [], 0.0, 0.0, 0.0
    for result in sorted(results, key=lambda result: result.seconds / max(1.0, result.num_bytes), reverse=True):
        if not result.num_bytes or not result.seconds:
            continue
        exposed = 2 * result.num_bytes / host_bandwidth * (1 - overlap)
        if on_device + result.num_bytes <= device_bytes:
            keep.append(result.name)
            on_device += result.num_bytes
        elif on_host + result.num_bytes <= host_bytes and exposed < result.seconds:
            offload.append(result.name)
            on_host += result.num_bytes
        else:
            continue
        saved += result.seconds
    return RematPlan(
        keep=tuple(keep), offload=tuple(offload), device_bytes=on_device, host_bytes=on_host, saved_seconds=saved
    )


def _widths(model: ModelConfig, mixer: str, mlp: str, tensor: int) -> dict[RematResult, float]:
    """Numbers of one token of one layer that each result holds on one device."""
    linear, full, moe, width = model.linear_attention, model.full_attention, model.moe, model.width
    if mixer == "linear" and model.linear_attention_kind == "kimi_delta":
        heads, values = linear.num_heads / tensor, linear.value_width
        gate = values if linear.output_gate == "full" else 0
        narrow = linear.decay_rank + (0 if gate else linear.output_gate_rank)
        projections = heads * (3 * linear.key_width + 2 * values + gate + 1) + narrow + width
    elif mixer == "linear":
        net = model.gated_delta_net
        heads, values = net.num_value_heads / tensor, net.value_width
        projections = 2 * net.num_key_heads / tensor * net.key_width + heads * (2 * values + 2) + width
    elif model.full_attention_kind == "latent":
        heads, values = full.num_heads / tensor, full.value_width
        gate = values if full.output_gate == "sigmoid" else 0
        expanded = full.key_width + full.nope_width + values + gate
        projections = full.query_rank + heads * expanded + full.latent_width + full.shared_key_width + width
    else:
        grouped = model.grouped_attention
        heads, values = grouped.num_heads / tensor, grouped.head_width
        projections = heads * values + 2 * grouped.num_key_heads / tensor * values + width
    if mlp == "dense":
        return {
            "projections": projections + 2 * moe.dense_width / tensor + width,
            "attention": heads * values,
            "experts": 0,
        }
    latent = moe.latent_width
    projections += (latent + width if latent else 0) + 2 * moe.shared_hidden_width / tensor
    projections += width if moe.num_shared_experts else 0
    return {"projections": projections, "attention": heads * values, "experts": latent or width}
