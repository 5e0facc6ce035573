"""Gradients of bfloat16 activations add up in float32: GPUs add bfloat16 numbers up in bfloat16."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mmjax.config import LoraConfig, ModelConfig, VisionConfig
from mmjax.models import fused_attention
from mmjax.models.lora import define_adapted, match
from mmjax.models.multimodal import define

# More terms than a token has streams, or choices here.
FEW = 4
MODEL = ModelConfig(vision=VisionConfig(num_layers=0), compute_dtype="bfloat16", remat="none")
MODEL = dataclasses.replace(
    MODEL,
    num_layers=2,
    full_attention_layers=(1,),
    full_attention=dataclasses.replace(MODEL.full_attention, num_heads=8),
    moe=dataclasses.replace(MODEL.moe, num_experts=8, experts_per_token=6, num_dense_layers=0),
)


def narrow_sums(jaxpr) -> collections.Counter:
    """Of (operation, shape) that add up more than a few terms in bfloat16."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        inner = (one for value in parameters.values() for one in (value if isinstance(value, tuple) else (value,)))
        for one in (getattr(value, "jaxpr", value) for value in inner):
            found += narrow_sums(one) if hasattr(one, "eqns") else {}
        if name not in ("reduce_sum", "scatter-add") or equation.invars[0].aval.dtype != jnp.bfloat16:
            continue
        terms = equation.invars[0].aval.size // equation.outvars[0].aval.size
        if (name == "reduce_sum" and terms > FEW) or (name == "scatter-add" and not parameters["unique_indices"]):
            found[name, equation.invars[0].aval.str_short()] += 1
    return found


@pytest.mark.parametrize("experts", ["", "shared_down"])
def test_no_gradient_adds_up_in_half_precision(experts, one_device, make_batch):
    lora = LoraConfig(rank=4, experts=experts) if experts else None
    definition = define_adapted(MODEL, lora, match(MODEL, lora)) if lora else define(MODEL)
    groups = [
        {path: variable.get_value() for path, variable in group.items()}
        for group in (definition.parameters, definition.router_biases, definition.frozen)
    ]

    def loss(parameters, router_biases, frozen, batch):
        hidden, _ = definition.assemble(parameters, router_biases, frozen)(batch)
        return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

    batch = jax.tree.map(jnp.asarray, make_batch(MODEL))
    assert not narrow_sums(jax.make_jaxpr(one_device(jax.grad(loss)))(*groups, batch).jaxpr)


def test_nor_do_those_of_keys_that_several_heads_share(monkeypatch):
    # Of cuDNN, which no CPU has, only the shapes matter.
    monkeypatch.setattr(fused_attention, "_by_cudnn", lambda query, key, value, **_: query * key * value)
    query, key = jnp.ones((1, 3, 16, 8), jnp.bfloat16), jnp.ones((1, 3, 2, 8), jnp.bfloat16)

    def loss(key):
        mixed = fused_attention._several_documents(query, key, key, jnp.ones((1, 3), jnp.int32), scale=1.0)
        return jnp.sum(mixed.astype(jnp.float32))

    assert not narrow_sums(jax.make_jaxpr(jax.grad(loss))(key).jaxpr)
