"""Rows of a batch as micro-batches."""

import jax
import numpy as np

from mmjax.config import ModelConfig, VisionConfig
from mmjax.training.pipeline_step import split_rows


def test_rows_stay_in_order_and_fields_without_numbers_are_made_anew(make_batch):
    model = ModelConfig(vision=VisionConfig(num_layers=0))
    batch = make_batch(model, rows=4, row_tokens=8, row_patches=0)
    split = split_rows(batch, 2)
    np.testing.assert_array_equal(split.tokens[1, 0], batch.tokens[2])
    assert split.patches.shape == (2, 2, *batch.patches.shape[1:]) and split.patches.dtype == batch.patches.dtype
    traced = jax.make_jaxpr(split_rows, static_argnums=1)(batch, 2).jaxpr
    read = {id(value) for equation in traced.eqns for value in equation.invars}
    # XLA of jax 0.11 crashes where a loop reads an empty array that devices were given.
    assert all((id(given) in read) == (given.aval.size > 0) for given in traced.invars)
    assert any(given.aval.size == 0 for given in traced.invars)
