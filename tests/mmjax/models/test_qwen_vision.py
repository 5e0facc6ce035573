"""Positions of tokens around pictures, by hand, and the rotation of patches."""

import jax.numpy as jnp
import numpy as np

from mmjax.models.qwen_vision import row_column_rotation, token_positions
from tests.mmjax.models.families.picture_samples import batch_of, join
from tests.mmjax.models.families.test_qwen3_vl import VALUES, picture


def test_positions_begin_anew_in_each_document_and_pictures_take_their_longer_side():
    sizes = {"values": VALUES, "patches_per_feature": 4}
    wide, tall = (picture(np.zeros((r * c, VALUES)), r, c) for r, c in ((4, 6), (6, 2)))
    first, second = join([[5, 6], wide, tall, [7]], **sizes), join([tall, [8, 9]], **sizes)
    batch = batch_of([[first, second], [second]], row_tokens=18, row_patches=52, **sizes)
    found = np.asarray(token_positions(batch))
    # Two tokens; 2 x 3 windows from 2 on; 3 x 1 windows from 5 on, next to them; a token at 8.
    rows = [0, 1, *(2, 2, 2, 3, 3, 3), *(5, 6, 7), 8]
    columns = [0, 1, *(2, 3, 4, 2, 3, 4), *(5, 5, 5), 8]
    frames = [0, 1, *(6 * [2]), *(3 * [5]), 8]
    assert found[:, 0, :12].tolist() == [frames, rows, columns]
    alone = [[0, 0, 0, 3, 4], [0, 1, 2, 3, 4], [0, 0, 0, 3, 4]]
    assert found[:, 0, 12:17].tolist() == found[:, 1, :5].tolist() == alone


def test_the_first_pairs_of_a_patch_turn_with_its_row_and_the_others_with_its_column():
    position = jnp.array([[[0, 0, 0], [0, 3, 0], [0, 0, 3]]])
    angles = np.arctan2(*reversed(row_column_rotation(position, 8, 100.0, jnp.float32)))
    expected = np.array([[0, 0, 0, 0], [3, 3 * 100**-0.5, 0, 0], [0, 0, 3, 3 * 100**-0.5]])
    np.testing.assert_allclose(angles[0], expected, atol=1e-6)
