"""The delta rule chunk by chunk: matrix products inside chunks, a scan over chunks for the state alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_attention.documents import document_index, per_value_head, starting_state, wide_dtype

TILE = 16
"""Rows whose pairs are taken one by one; larger blocks are matrix products."""

# TensorFloat-32 would round sums of decays and the inverse.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def delta_rule(
    query: Float[Array, "B S G K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S H V"],
    log_decay: Float[Array, "B S H K"] | Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    chunk_tokens: int = 64,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """See `api.delta_rule`.

    With G the sums of log decays from a chunk's first token on, S the state that enters it, D_ij = exp(G_i - G_j):

        L_ij = beta_i sum_k key_ik key_jk D_ijk  (j < i)        P_ij = sum_k query_ik key_jk D_ijk  (j <= i)
        [w, u] = (I + L)^-1 beta [exp(G) key, value]            v = u - w S
        output = (exp(G) query) S + P v                         S' = (diag(exp(G_C)) - r^T w) S + r^T u
        r = exp(G_C - G) key

    Backward by automatic differentiation; what lives inside a chunk is computed again there.
    """
    batch, length, heads, _ = value.shape
    query, key = per_value_head(query, heads), per_value_head(key, heads)
    while chunk_tokens // 2 >= max(length, TILE):
        chunk_tokens //= 2
    num_chunks = -(-length // chunk_tokens)
    state = starting_state(initial_state, query, value, key, log_decay, beta)
    documents = document_index(segment_ids)

    def chunks(array: jax.Array, mode: str = "constant") -> jax.Array:
        """[B, S, H, ...] -> [B H N, C, ...]; the tail neither decays, writes nor starts a document."""
        padding = [(0, 0)] * array.ndim
        padding[1] = (0, num_chunks * chunk_tokens - length)
        array = jnp.pad(array, padding, mode=mode)
        array = array.reshape(batch, num_chunks, chunk_tokens, *array.shape[2:])
        return jnp.moveaxis(array, 3, 1).reshape(-1, chunk_tokens, *array.shape[4:])

    def per_chunk(array: jax.Array) -> jax.Array:
        """[B H N, ...] -> [N, B H, ...]."""
        return jnp.moveaxis(array.reshape(batch * heads, num_chunks, *array.shape[1:]), 1, 0)

    document = chunks(jnp.broadcast_to(documents[..., None], (batch, length, heads)), "edge")
    by_chunk = document.reshape(batch * heads, num_chunks, chunk_tokens)
    entering = jnp.pad(by_chunk[:, :-1, -1], ((0, 0), (1, 0))).reshape(-1, 1)  # 0: a row's first document
    arrays = [chunks(array.astype(state.dtype)) for array in (query, key, value, log_decay, beta)]
    reading, products, w, u, transition, addition = _inside_chunks(*arrays, document, entering)

    def step(state, chunk):
        transition, addition = chunk
        return _einsum("nkl,nlv->nkv", transition, state) + addition, state

    state_shape = state.shape
    state, entered = lax.scan(step, state.reshape(-1, *state_shape[2:]), (per_chunk(transition), per_chunk(addition)))
    entered = jnp.moveaxis(entered, 0, 1).reshape(-1, *state_shape[2:])
    corrected = u - _einsum("nck,nkv->ncv", w, entered)
    output = _einsum("nck,nkv->ncv", reading, entered) + _einsum("nij,njv->niv", products, corrected)
    output = jnp.moveaxis(output.reshape(batch, heads, num_chunks * chunk_tokens, -1), 1, 2)[:, :length]
    return output.astype(value.dtype), state.reshape(state_shape)


@jax.checkpoint
def _inside_chunks(query, key, value, log_decay, beta, document, entering):
    """All of a chunk that does not need the state entering it. Arrays are [n, C, ...], n over rows, heads and chunks.

    Returns exp(G) query, P, w, u, and the two parts of the state's update. Every mask selects finite numbers, so that
    neither value nor gradient of one document depends on another.
    """
    chunk_tokens, key_width = key.shape[1:]
    decayed_products = _decayed_products if log_decay.ndim == 3 else _scalar_decayed_products
    products, from_start, to_end = decayed_products(jnp.stack([query, key]), key, log_decay, document)
    same_document = document[:, :, None] == document[:, None, :]
    products = jnp.where(same_document[None], products, 0)
    strictly_lower = jnp.asarray(np.tril(np.ones((chunk_tokens, chunk_tokens), bool), -1))
    inverse = _unit_lower_inverse(jnp.where(strictly_lower[None], products[1] * beta[..., None], 0))

    # The entering state is seen before the first boundary only; the last document alone is carried on.
    last = document[:, -1:]
    seen = (document == entering)[..., None]
    decay = jnp.exp(from_start)
    reading = jnp.where(seen, decay * query, 0)
    solved = jnp.concatenate([jnp.where(seen, decay * key, 0), value], axis=-1) * beta[..., None]
    solved = _einsum("nij,njk->nik", inverse, solved)
    w, u = solved[..., :key_width], solved[..., key_width:]
    writing = jnp.where((document == last)[..., None], jnp.exp(to_end) * key, 0)
    kept = jnp.where(entering == last, jnp.broadcast_to(decay[:, -1], (decay.shape[0], key_width)), 0)
    update = _einsum("nck,ncl->nkl", writing, solved)
    diagonal = kept[:, :, None] * jnp.eye(key_width, dtype=kept.dtype)[None]
    return reading, products[0], w, u, diagonal - update[..., :key_width], update[..., key_width:]


def _decayed_products(
    rows: Float[Array, "x n C K"],
    columns: Float[Array, "n C K"],
    log_decay: Float[Array, "n C K"],
    document: Int[Array, "n C"],
) -> tuple[Float[Array, "x n C C"], Float[Array, "n C K"], Float[Array, "n C K"]]:
    """Products of rows with earlier columns, decayed in between; and the log decay from the start and to the end.

        products_ij = sum_k rows_ik columns_jk exp(sum_{j < r <= i} log_decay_rk)  (j <= i, else 0)
        from_start_i = sum_{r <= i} log_decay_r        to_end_i = sum_{r > i} log_decay_r

    Tiles on the diagonal pair by pair; then blocks of twice the size, in which late rows decay from the middle on and
    early columns up to the middle, so that no exponent is ever positive. Right where one document covers all tokens
    between (for the sums: up to the chunk's edge); elsewhere finite, and to be masked.
    """
    num_rows, n, length, width = rows.shape
    tile_document = document.reshape(-1, TILE)
    same_document = tile_document[:, :, None] == tile_document[:, None, :]
    earlier = same_document & jnp.asarray(np.tril(np.ones((1, TILE, TILE), bool), -1))
    not_later = earlier | jnp.asarray(np.eye(TILE, dtype=bool))[None]
    decay = log_decay.reshape(-1, TILE, width)
    # Sums over one document: those of another would cost this one its last digits.
    from_start = _einsum("nij,njk->nik", not_later.astype(decay.dtype), decay)
    to_end = _einsum("nij,nik->njk", earlier.astype(decay.dtype), decay)
    # Masked before the exponential, whose overflow would turn the gradient into NaN. A token does not decay against
    # itself: a constant, since its two gradients would cancel but for their rounding.
    between = from_start[:, :, None] - from_start[:, None]
    itself = jnp.asarray(np.where(np.eye(TILE, dtype=bool), 0.0, -np.inf), decay.dtype)
    between = jnp.where(earlier[..., None], between, itself[None, ..., None])
    decayed = columns.reshape(-1, 1, TILE, width) * jnp.exp(between)
    products = _einsum("xnik,nijk->xnij", rows.reshape(num_rows, -1, TILE, width), decayed)
    size = TILE
    while size < length:
        early_start, late_start = _halves(from_start)
        early_end, late_end = _halves(to_end)
        late = _halves(rows.reshape(num_rows, -1, size, width))[1] * jnp.exp(late_start)[None]
        early = _halves(columns.reshape(-1, size, width))[0] * jnp.exp(early_end)
        products = _lower_blocks(products, _einsum("xnik,njk->xnij", late, early))
        from_start = jnp.concatenate([early_start, late_start + early_start[:, -1:]], axis=1)
        to_end = jnp.concatenate([early_end + late_start[:, -1:], late_end], axis=1)
        size *= 2
    return (
        products.reshape(num_rows, n, length, length),
        from_start.reshape(n, length, width),
        to_end.reshape(n, length, width),
    )


def _scalar_decayed_products(
    rows: Float[Array, "x n C K"],
    columns: Float[Array, "n C K"],
    log_decay: Float[Array, "n C"],
    document: Int[Array, "n C"],
) -> tuple[Float[Array, "x n C C"], Float[Array, "n C 1"], Float[Array, "n C 1"]]:
    """`_decayed_products` of a decay that all channels share: it leaves the sum over channels.

    Decays between two tokens are summed from the earlier one on: a difference of long sums would lose digits.
    """
    length = log_decay.shape[1]
    same_document = document[:, :, None] == document[:, None, :]
    earlier = jnp.asarray(np.tril(np.ones((1, length, length), bool), -1))
    between = jnp.cumsum(jnp.where(earlier, log_decay[:, :, None], 0), axis=1)
    # Masked before the exponential; later tokens are excluded by a product with zero, of finite numbers.
    between = jnp.exp(jnp.where(same_document & earlier, between, 0))
    not_later = jnp.asarray(np.tril(np.ones((1, length, length), bool)), between.dtype)
    products = _einsum("xnik,njk->xnij", rows, columns) * (between * not_later)[None]
    weights = jnp.where(same_document, not_later, 0)
    from_start = _einsum("nij,nj->ni", weights, log_decay)
    to_end = _einsum("nji,nj->ni", jnp.where(earlier, weights, 0), log_decay)
    return products, from_start[..., None], to_end[..., None]


def _unit_lower_inverse(lower: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    """`(I + lower)^-1` of strictly lower triangular matrices, by blocks of doubled size.

        [[A, 0], [P, B]]^-1 = [[A^-1, 0], [-B^-1 P A^-1, B^-1]]

    The blocks carry no gradient; one Newton step `X (2 I - (I + lower) X)` does, and polishes the value. A triangular
    solve calls LAPACK once a matrix: several times slower on an idle CPU, hundreds of times on a busy one.
    """
    length = lower.shape[1]
    fixed = lax.stop_gradient(lower)
    tiles = _diagonal_blocks(fixed, TILE)
    index = np.arange(TILE)
    inverse = jnp.broadcast_to(jnp.eye(TILE, dtype=lower.dtype)[None], tiles.shape)
    for size in (1, 2, 4, 8):
        pair = (index[:, None] // size % 2 == 1) & (index[:, None] // size - 1 == index[None, :] // size)
        corner = jnp.where(jnp.asarray(pair)[None], tiles, 0)
        inverse = inverse - _einsum("nij,njk,nkl->nil", inverse, corner, inverse)
    size = TILE
    while size < length:
        first, second = _halves(inverse)
        corner = _diagonal_blocks(fixed, 2 * size)[:, size:, :size]
        inverse = _lower_blocks(inverse, -_einsum("nij,njk,nkl->nil", second, corner, first))
        size *= 2
    identity = jnp.eye(length, dtype=lower.dtype)[None]
    residual = identity - inverse - _einsum("nij,njk->nik", lower, inverse)
    return inverse + _einsum("nij,njk->nik", inverse, residual)


def _halves(blocks: Float[Array, "*x m s K"]) -> list[jax.Array]:
    """The first and the second of each pair of neighbouring blocks, [..., m / 2, s, K] each."""
    *lead, _, size, width = blocks.shape
    return jnp.split(blocks.reshape(*lead, -1, 2 * size, width), 2, axis=-2)


def _lower_blocks(diagonal: Float[Array, "*x m s s"], corner: Float[Array, "*x n s s"]) -> jax.Array:
    """[[first, 0], [corner, second]] for each pair of neighbouring diagonal blocks, [..., m / 2, 2 s, 2 s]."""
    first, second = _halves(diagonal)
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _diagonal_blocks(matrices: Float[Array, "n C C"], size: int) -> Float[Array, "m s s"]:
    """The blocks of `size` on the diagonals, one matrix after the other."""
    slices = [slice(start, start + size) for start in range(0, matrices.shape[1], size)]
    return jnp.stack([matrices[:, block, block] for block in slices], axis=1).reshape(-1, size, size)


def short_convolution(
    inputs: Float[Array, "B S ..."],
    taps: Float[Array, "W ..."],
    segment_ids: Int[Array, "B S"],
    *,
    initial_tail: Float[Array, "B W-1 ..."] | None = None,
) -> Float[Array, "B S ..."]:
    """See `api.short_convolution`; without its norm."""
    width, length = taps.shape[0], inputs.shape[1]
    wide = wide_dtype(inputs, taps)
    channels = (1,) * (inputs.ndim - 2)
    documents = jnp.pad(document_index(segment_ids), ((0, 0), (width - 1, 0)))
    padded = behind(initial_tail, inputs, width).astype(wide)
    total = taps[-1].astype(wide)[None, None] * padded[:, width - 1 :]
    for tap in range(width - 1):
        is_same = documents[:, tap : tap + length] == documents[:, width - 1 :]
        earlier = jnp.where(is_same.reshape(*is_same.shape, *channels), padded[:, tap : tap + length], 0)
        total = total + taps[tap].astype(wide)[None, None] * earlier
    return jax.nn.silu(total).astype(inputs.dtype)


def behind(tail: jax.Array | None, inputs: jax.Array, width: int) -> jax.Array:
    """`inputs` with the tail, or zeros, in front: [B, W - 1 + S, ...]."""
    if tail is None:
        return jnp.pad(inputs, ((0, 0), (width - 1, 0), *((0, 0) for _ in inputs.shape[2:])))
    return jnp.concatenate([tail.astype(inputs.dtype), inputs], axis=1)
