import dataclasses

import jax
import jax.numpy as jnp

from mmjax.config import ModelConfig
from mmjax.models.hyper_connections import HyperConnection


def test_streams_are_mixed_in_whole_float32_also_where_its_products_are_rounded_by_default(one_device):
    module = HyperConnection(dataclasses.replace(ModelConfig(), residual="hyper", compute_dtype="bfloat16"))
    for variable in (module.projection, module.base, module.scale):
        variable.set_value(jnp.ones(variable.get_value().shape, jnp.float32))
    streams = jnp.ones((1, 3, module.config.num_streams, 64), jnp.bfloat16)

    def run(streams):
        inputs, weights = module.enter(streams)
        return module.leave(streams, inputs, weights)

    text = str(jax.make_jaxpr(one_device(run))(streams))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 3
