"""The indexer's loss over selected keys and its gradients, in Pallas for Triton: one query a program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sparse_attention.gathering import BLOCK, count_blocks

APART = 5
"""Blocks of keys from where one query begins to where the next one does."""
EXTRA_BITS = 18
"""Of a sum in whole numbers, at least, below the 22 of its largest possible value."""
LOWEST = -1e30
"""Below all scores, and finite."""


def loss(
    index_query: jax.Array, index_key: jax.Array, head_weight: jax.Array, indices: jax.Array, target: jax.Array,
    *, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """KL divergence, logarithm of the sum of exponentials, and highest score of each query: three of [T] float32.

    `index_query` [T, J, K] and `index_key` [S, K] in bfloat16, `head_weight` [T, J] float32, `indices` [T, N] int32,
    `target` [T, N] float32 that sums to 1, or is 0, and is 0 in holes. J is a power of two of at least 16, N a multiple
    of 64.
    """
    specs, whole, row = _specs(index_query, index_key, indices)
    shape = jax.ShapeDtypeStruct(indices.shape[:1], jnp.float32, manual_axis_type=_varying(index_query))
    return pl.pallas_call(
        _loss,
        grid=indices.shape[:1],
        in_specs=[*specs[:2], row, row, specs[2], whole],
        out_specs=[specs[2]] * 3,
        out_shape=[shape] * 3,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="selected_loss",
    )(index_query, head_weight, indices, target, count_blocks(indices), index_key)


def gradients(
    index_query: jax.Array, index_key: jax.Array, head_weight: jax.Array, indices: jax.Array, target: jax.Array,
    normals: jax.Array, loss_gradient: jax.Array, *, most: jax.Array | None = None, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Gradients [T, J, K], [S, K] and [T, J], float32, of the losses times `loss_gradient` [T].

    With `most` [], which no sum of absolute parts of the keys' gradient may exceed, that gradient is summed in whole
    numbers, bitwise the same in whatever order.

    Raises:
      ValueError: there are more than 2^23 queries to sum over in whole numbers.
    """
    specs, whole, row = _specs(index_query, index_key, indices)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, manual_axis_type=_varying(index_query))
    # A sum of whole numbers is exact, in whatever order, as long as it stays below 2^24. A number is whole units, then
    # whole parts of what is left, each with as many bits as T such parts leave room for.
    bits = 24 - (indices.shape[0] - 1).bit_length()
    if most is not None and bits < 1:
        raise ValueError(f"sums that do not depend on the order take up to 2^23 queries, got {indices.shape[0]}")
    num_words = 1 if most is None else 1 + -(-EXTRA_BITS // bits)
    units = () if most is None else (jnp.broadcast_to(jnp.maximum(most * 2.0**-22, 2.0**-100), normals.shape),)
    num_rows = index_key.shape[0] + int(interpret)
    zeros = jnp.broadcast_to(
        jnp.pad(lax.full_like(index_key, 0, jnp.float32), ((0, int(interpret)), (0, 0)))[None],
        (num_words, num_rows, index_key.shape[1]),
    )
    all_sums = pl.BlockSpec(zeros.shape, lambda row: (0, 0, 0))
    inputs = index_query, head_weight, indices, target, count_blocks(indices), normals, loss_gradient, *units, index_key
    query_gradient, weight_gradient, sums = pl.pallas_call(
        functools.partial(_gradients, bits=bits, interpret=interpret),
        grid=indices.shape[:1],
        in_specs=[*specs[:2], row, row, *[specs[2]] * (3 + len(units)), whole, all_sums],
        out_specs=[specs[0], specs[1], all_sums],
        out_shape=[*map(shape, (index_query.shape, head_weight.shape, zeros.shape))],
        input_output_aliases={len(inputs): 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="selected_loss_backward",
    )(*inputs, zeros)
    key_gradient = sums[0, : index_key.shape[0]]
    for word in range(1, num_words):
        key_gradient += sums[word, : index_key.shape[0]] * 2.0 ** (-word * bits)
    if units:
        key_gradient *= units[0][0]
    return query_gradient, key_gradient, weight_gradient


def _varying(array: jax.Array) -> Any:
    return jax.typeof(array).manual_axis_type


def _specs(index_query: jax.Array, index_key: jax.Array, indices: jax.Array):
    query = pl.BlockSpec((None, *index_query.shape[1:]), lambda row: (row, 0, 0))
    weight = pl.BlockSpec((None, index_query.shape[1]), lambda row: (row, 0))
    number = pl.BlockSpec((None,), lambda row: (row,))
    whole = pl.BlockSpec(index_key.shape, lambda row: (0, 0))
    row = pl.BlockSpec((None, indices.shape[1]), lambda row: (row, 0))
    return [query, weight, number], whole, row


def _read(block, indices_ref: Any, target_ref: Any, keys_ref: Any):
    """(keys' numbers, which are none, target, keys [64, K]) of one block."""
    own = pl.ds(block * BLOCK, BLOCK)
    index, target = indices_ref[own], target_ref[own]
    is_key = index >= 0
    index = jnp.where(is_key, index, 0)
    column = lax.broadcasted_iota(jnp.int32, (BLOCK, keys_ref.shape[1]), 1)
    place = jnp.broadcast_to(index[:, None], column.shape)
    return place, column, is_key, target, plt.load(keys_ref.at[place, column])


def _dot(one, other):
    return lax.dot_general(one, other, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _loss(query_ref, weight_ref, indices_ref, target_ref, count_ref, keys_ref, loss_ref, normal_ref, highest_ref):
    query, weight = query_ref[...], weight_ref[...]
    scale = query.shape[1] ** -0.5

    def block(number, carry):
        highest, total, of_target, mixed = carry
        _, _, is_key, target, keys = _read(number, indices_ref, target_ref, keys_ref)
        products = _dot(query, keys.T)
        scores = jnp.sum(jnp.maximum(products * scale, 0) * weight[:, None], axis=0)
        masked = jnp.where(is_key, scores, LOWEST)
        new = jnp.maximum(highest, jnp.max(masked))
        total = total * jnp.exp(highest - new) + jnp.sum(jnp.where(is_key, jnp.exp(masked - new), 0.0))
        entropy = jnp.where(target > 0, target * jnp.log(jnp.where(target > 0, target, 1.0)), 0.0)
        of_target = of_target + jnp.sum(entropy - jnp.where(is_key, target * scores, 0.0))
        return new, total, of_target, mixed + jnp.sum(jnp.where(is_key, target, 0.0))

    zero = jnp.float32(0)
    carry = jnp.float32(LOWEST), zero, zero, zero
    highest, total, of_target, mixed = lax.fori_loop(0, count_ref[...], block, carry)
    normal = highest + jnp.log(jnp.where(total > 0, total, 1.0))
    normal_ref[...], highest_ref[...] = normal, highest
    loss_ref[...] = jnp.where(total > 0, of_target + normal * mixed, 0.0)


def _gradients(
    query_ref, weight_ref, indices_ref, target_ref, count_ref, normal_ref, loss_gradient_ref, *refs, bits, interpret,
):  # fmt: skip
    *unit_ref, keys_ref, _, query_out, weight_out, keys_out = refs
    query, weight, normal, loss_gradient = query_ref[...], weight_ref[...], normal_ref[...], loss_gradient_ref[...]
    scale, count = query.shape[1] ** -0.5, count_ref[...]
    # Neighbours, which have many keys in common, would else add to the same ones at the same time.
    begin = pl.program_id(0) * APART

    def block(number, carry):
        query_gradient, weight_gradient = carry
        number = lax.rem(number + begin, count)
        place, column, is_key, target, keys = _read(number, indices_ref, target_ref, keys_ref)
        products = _dot(query, keys.T) * scale
        scores = jnp.sum(jnp.maximum(products, 0) * weight[:, None], axis=0)
        by_score = jnp.where(is_key, (jnp.exp(jnp.minimum(scores - normal, 0.0)) - target) * loss_gradient, 0.0)
        weight_gradient = weight_gradient + jnp.sum(jnp.maximum(products, 0) * by_score[None], axis=1)
        by_product = jnp.where(products > 0, by_score[None] * weight[:, None] * scale, 0.0).astype(keys.dtype)
        query_gradient = query_gradient + _dot(by_product, keys)
        # The same turned, multiplied anew: a product's result that is turned and multiplied again comes out wrong from
        # some releases of Triton.
        turned = _dot(keys, query.T)
        turned = jnp.where(turned > 0, by_score[:, None] * weight[None] * scale, 0.0).astype(keys.dtype)
        mask = None if interpret else jnp.broadcast_to(is_key[:, None], place.shape)
        # Interpreted, nothing can be masked: holes then add to a row of their own.
        place = jnp.where(is_key[:, None], place, keys_ref.shape[0]) if interpret else place
        by_key = _dot(turned, query)
        if not unit_ref:
            plt.atomic_add(keys_out, (jnp.zeros_like(place), place, column), by_key, mask=mask)
            return query_gradient, weight_gradient
        rest = by_key / unit_ref[0][...]
        for word in range(keys_out.shape[0]):
            whole = jnp.floor(rest)
            plt.atomic_add(keys_out, (jnp.full_like(place, word), place, column), whole, mask=mask)
            rest = (rest - whole) * 2.0**bits
        return query_gradient, weight_gradient

    zeros = jnp.zeros(query.shape, jnp.float32), jnp.zeros(weight.shape, jnp.float32)
    query_out[...], weight_out[...] = lax.fori_loop(0, count, block, zeros)
