import dataclasses

import jax
import numpy as np

from mmjax.config import MeshConfig, ModelConfig, MoeConfig, RunConfig, VisionConfig
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, make_value_and_gradient, place_batch

MODEL = ModelConfig(
    width=16,
    num_layers=1,
    vocabulary_size=32,
    full_attention_layers=(0,),
    full_attention_kind="grouped",
    residual="plain",
    moe=MoeConfig(
        num_experts=4, experts_per_token=1, expert_width=8, latent_width=8, num_shared_experts=0, num_dense_layers=0
    ),
    vision=VisionConfig(num_layers=0),
    parameter_dtype="float64",
    compute_dtype="float64",
)


def test_a_step_gives_the_same_on_a_permuted_mesh(make_batch):
    config, random = RunConfig(model=MODEL, mesh=MeshConfig(fsdp=2, expert=2, tensor=2)), np.random.default_rng(0)
    batch, values, found = make_batch(MODEL, rows=4, row_tokens=8, row_patches=0), {}, []

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values.setdefault(path, random.normal(size=leaf.shape).astype(leaf.dtype))
        return jax.device_put(values[path], leaf.sharding)

    with jax.enable_x64(True):
        for order in ((), (5, 2, 7, 0, 1, 6, 3, 4)):
            here = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, device_order=order))
            mesh = make_mesh(here.mesh)
            state = abstract_state(here, mesh)
            groups = [
                {path: place(path, leaf) for path, leaf in group.items()}
                for group in (state.parameters, state.router_biases)
            ]
            loss, _, _, gradients = jax.jit(make_value_and_gradient(here, mesh))(*groups, place_batch(batch, mesh))
            devices = [device.id for device in gradients["decoder.embedding"].sharding.mesh.devices.flat]
            assert devices == list(order or range(8))
            found.append(jax.device_get((loss, gradients)))
    jax.tree.map(np.testing.assert_array_equal, *found)
