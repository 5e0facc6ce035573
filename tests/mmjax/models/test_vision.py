"""Vision tower and projector against torch in float64, image by image, written from the formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mmjax.axes import DATA_AXES
from mmjax.config import MeshConfig, VisionConfig
from mmjax.models.layers import initial_arrays
from mmjax.models.vision import Projector, VisionTower
from mmjax.parallel.fsdp import make_varying
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec, state_specs

VISION = VisionConfig(
    num_layers=2, width=8, num_heads=2, head_width=8, hidden_width=12, patch_pixels=2, table_rows=6, table_columns=4
)
TEXT_WIDTH = 6
PATCH_SLOTS = 56
# Rows of (frames, rows, columns): smaller, larger and equal to the table; a clip between stills; padding at the end.
ROWS = (((1, 2, 6), (2, 4, 2), (1, 2, 2)), ((1, 6, 4), (1, 4, 2)))


def windows_of(grid):
    """(frame, row, column) of every patch of an image, 2x2 windows one after the other."""
    frames, rows, columns = grid
    corners = [(f, r, c) for f in range(frames) for r in range(0, rows, 2) for c in range(0, columns, 2)]
    return np.asarray([(f, r + i, c + j) for f, r, c in corners for i in (0, 1) for j in (0, 1)])


def batch_of(rows, images):
    """Buffers of the rows' images; `images` maps (row, image) to its patches [frames * rows * columns, C*p*p]."""
    num_rows, values = len(rows), next(iter(images.values())).shape[-1]
    batch = {
        "patches": np.zeros((num_rows, PATCH_SLOTS, values)),
        "segment_ids": np.zeros((num_rows, PATCH_SLOTS), np.int32),
        "position": np.zeros((num_rows, PATCH_SLOTS, 3), np.int32),
        "grid": np.zeros((num_rows, PATCH_SLOTS, 3), np.int32),
        "feature": np.full((num_rows, PATCH_SLOTS // 4), -1, np.int32),
    }
    for row, grids in enumerate(rows):
        start = first_feature = 0
        for image, grid in enumerate(grids):
            stop = start + np.prod(grid)
            batch["patches"][row, start:stop] = images[row, image]
            batch["segment_ids"][row, start:stop] = image + 1
            batch["position"][row, start:stop] = windows_of(grid)
            batch["grid"][row, start:stop] = grid
            num_features = grid[1] * grid[2] // 4
            batch["feature"][row, start // 4 : stop // 4] = first_feature + np.tile(np.arange(num_features), grid[0])
            start, first_feature = stop, first_feature + num_features
    return batch


def random_images(rows, seed=1):
    random = np.random.default_rng(seed)
    values = VISION.channels * VISION.patch_pixels**2
    return {
        (row, image): random.normal(size=(np.prod(grid), values))
        for row, grids in enumerate(rows)
        for image, grid in enumerate(grids)
    }


class Model(nnx.Module):
    """Tower and projector."""

    def __init__(self, vision: VisionConfig, dtype):
        self.tower = VisionTower(vision, 0.4, dtype)
        self.projector = Projector(vision, TEXT_WIDTH, dtype)

    def __call__(self, patches, segment_ids, position, grid, feature):
        return self.projector(self.tower(patches, segment_ids, position, grid, feature))


def random_model():
    """All weights random, norms away from 1; float64."""
    graph, state = nnx.split(Model(VISION, jnp.float64))
    random = np.random.default_rng(2)
    return graph, jax.tree.map(lambda leaf: jnp.asarray(0.5 * random.normal(size=leaf.shape)), state)


def cotangent():
    return np.random.default_rng(3).normal(size=(len(ROWS), PATCH_SLOTS // 4, TEXT_WIDTH))


@pytest.fixture(scope="module")
def run():
    """Jitted: features of a batch, and the gradients of their product with the cotangent for weights and patches."""
    graph = nnx.graphdef(Model(VISION, jnp.float32))
    mesh = make_mesh(MeshConfig())

    def product(state, patches, others, weights):
        features = nnx.merge(graph, state)(patches, **others)
        return jnp.sum(features * weights), features

    def gradients(state, batch, weights):
        others = {name: array for name, array in batch.items() if name != "patches"}
        call = jax.value_and_grad(product, argnums=(0, 1), has_aux=True)
        (_, features), slopes = call(state, batch["patches"], others, weights)
        return features, *slopes

    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def torch_features(torch, weights, grid, patches):
    """Features of one image after the projector. `patches` are in window order."""
    functional = torch.nn.functional
    frames, rows, columns = grid
    order = windows_of(grid)
    row_major = np.argsort(np.ravel_multi_index(order.T, grid))
    hidden = patches[row_major] @ weights["tower.patch_embedding"]

    table = weights["tower.position_table"].permute(2, 0, 1)[None]
    resized = functional.interpolate(table, size=(rows, columns), mode="bilinear", align_corners=False)
    spatial = resized[0].permute(1, 2, 0).reshape(1, rows * columns, -1)
    hidden = hidden.reshape(frames, rows * columns, -1) + spatial
    if frames > 1:
        omega = 1 / 10000 ** (torch.arange(VISION.width // 2, dtype=torch.float64) / (VISION.width / 2))
        angle = torch.outer(torch.arange(frames, dtype=torch.float64), omega)
        hidden = hidden + torch.cat([angle.sin(), angle.cos()], dim=1)[:, None]
    hidden = hidden.reshape(frames * rows * columns, -1)

    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequencies = VISION.rope_base ** (
        -4 * torch.arange(VISION.head_width // 4, dtype=torch.float64) / VISION.head_width
    )
    angles = torch.stack([x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies], dim=-1).flatten(1)
    turn = torch.polar(torch.ones_like(angles), angles).repeat(frames, 1)[:, None]

    def norm(inputs, scale, epsilon=VISION.norm_epsilon):
        return inputs * (inputs.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * scale

    def rotate(inputs):
        pairs = torch.view_as_complex(inputs.reshape(*inputs.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    for layer in range(VISION.num_layers):
        own = {name.removeprefix("tower.layers."): leaf[layer] for name, leaf in weights.items() if ".layers." in name}
        qkv = torch.einsum("pd,dchk->cphk", norm(hidden, own["attention_norm"]), own["query_key_value"])
        query, key = rotate(qkv[0]), rotate(qkv[1])
        shares = (torch.einsum("phk,qhk->hpq", query, key) * VISION.head_width**-0.5).softmax(-1)
        hidden = hidden + torch.einsum("hpq,qhk,hkd->pd", shares, qkv[2], own["output"])
        bent = functional.gelu(norm(hidden, own["mlp_norm"]) @ own["up"], approximate="tanh")
        hidden = hidden + bent @ own["down"]
    hidden = norm(hidden, weights["tower.final_norm"])

    windows = hidden.reshape(frames, rows // 2, 2, columns // 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
    merged = windows.mean(0).reshape(rows * columns // 4, -1)
    projected = functional.gelu(merged @ weights["projector.up"]) @ weights["projector.down"]
    return norm(projected, weights["projector.norm"], VISION.projector_norm_epsilon)


def named(state):
    """Leaves of a state by dotted path."""
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}


def test_features_and_all_gradients_equal_torch_image_by_image(run):
    torch = pytest.importorskip("torch")
    images = random_images(ROWS)
    batch, weight = batch_of(ROWS, images), cotangent()
    with jax.enable_x64(True):
        _, state = random_model()
        features, to_weights, to_patches = run(state, batch, weight)

    leaves = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in named(state).items()}
    pixels = {key: torch.tensor(patches, requires_grad=True) for key, patches in images.items()}
    expected, expected_to_patches = np.zeros_like(weight), np.zeros_like(batch["patches"])
    total = 0
    for row, grids in enumerate(ROWS):
        slot = 0
        for image, grid in enumerate(grids):
            output = torch_features(torch, leaves, grid, pixels[row, image])
            slots = slice(slot, slot + len(output))
            expected[row, slots] = output.detach().numpy()
            total = total + (output * torch.tensor(weight[row, slots])).sum()
            slot = slots.stop
    total.backward()
    for (row, image), patches in pixels.items():
        expected_to_patches[row, batch["segment_ids"][row] == image + 1] = patches.grad.numpy()

    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(to_patches, expected_to_patches, rtol=0, atol=1e-12 * np.abs(expected_to_patches).max())
    actual = named(to_weights)
    assert actual.keys() == leaves.keys()
    for name, leaf in leaves.items():
        slope = leaf.grad.numpy()
        np.testing.assert_allclose(actual[name], slope, rtol=0, atol=1e-12 * np.abs(slope).max(), err_msg=name)


def test_exchanging_two_images_moves_only_their_features(run):
    rows = (((1, 2, 4), (1, 4, 2), (1, 2, 2)),) * 2
    exchanged = ((rows[0][1], rows[0][0], rows[0][2]), rows[1])
    images = random_images(rows)
    moved = {**images, (0, 0): images[0, 1], (0, 1): images[0, 0]}
    with jax.enable_x64(True):
        _, state = random_model()
        before = np.asarray(run(state, batch_of(rows, images), cotangent())[0])
        after = np.asarray(run(state, batch_of(exchanged, moved), cotangent())[0])
    order = [2, 3, 0, 1, *range(4, PATCH_SLOTS // 4)]
    np.testing.assert_allclose(after[0], before[0, order], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(after[1], before[1])
    assert np.abs(after[0, :2] - before[0, :2]).min() > 1e-6


def test_changing_one_image_moves_no_other(run):
    images = random_images(ROWS)
    changed = {**images, (0, 1): images[0, 1] + 1}
    with jax.enable_x64(True):
        _, state = random_model()
        before = np.asarray(run(state, batch_of(ROWS, images), cotangent())[0])
        after = np.asarray(run(state, batch_of(ROWS, changed), cotangent())[0])
    is_same = np.all(before == after, axis=-1)
    assert not np.any(is_same[0, 3:5])
    is_same[0, 3:5] = True
    assert np.all(is_same)


def test_padding_contents_change_nothing_and_get_no_gradient(run):
    batch = batch_of(ROWS, random_images(ROWS))
    is_padding = batch["segment_ids"] == 0
    noisy = {name: array.copy() for name, array in batch.items()}
    noisy["patches"][is_padding] = np.nan
    noisy["position"][is_padding] = (7, -3, 10**6)
    noisy["grid"][is_padding] = (0, 5, -2)
    with jax.enable_x64(True):
        _, state = random_model()
        clean_run, noisy_run = (run(state, one, cotangent()) for one in (batch, noisy))
    assert is_padding.any()
    jax.tree.map(np.testing.assert_array_equal, clean_run, noisy_run)
    assert np.all(np.asarray(clean_run[2])[is_padding] == 0)


def test_a_row_without_images_gives_zeros_and_finite_gradients(run):
    empty = {name: np.zeros_like(array) for name, array in batch_of(ROWS, random_images(ROWS)).items()}
    empty["feature"] -= 1
    with jax.enable_x64(True):
        _, state = random_model()
        features, to_weights, _ = run(state, empty, cotangent())
    assert np.all(np.asarray(features) == 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(to_weights))


def test_split_over_fsdp_expert_and_tensor_equals_one_device(run):
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    rows = ROWS * 2
    batch = batch_of(rows, random_images(rows))
    weight = np.concatenate([cotangent()] * 2)
    with jax.enable_x64(True):
        graph, state = random_model()

        def gradients(state, batch, weights):
            def product(state):
                features = nnx.merge(graph, make_varying(state))(**batch)
                return jax.lax.psum(jnp.sum(features * weights), DATA_AXES)

            return jax.value_and_grad(product)(state)

        specs = state_specs(state, mesh.shape)
        rows_spec = spec("batch")
        split = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, rows_spec, rows_spec), out_specs=(P(), specs))
        value, slopes = jax.jit(split)(state, batch, weight)
        features, expected, _ = run(state, batch, weight)
    np.testing.assert_allclose(value, np.sum(np.asarray(features) * weight), rtol=1e-12)
    for name, slope in named(expected).items():
        actual = named(slopes)[name]
        np.testing.assert_allclose(actual, slope, rtol=0, atol=1e-12 * np.abs(slope).max(), err_msg=name)


def test_bfloat16_stays_near_float64(run):
    batch = batch_of(ROWS, random_images(ROWS))
    with jax.enable_x64(True):
        graph, state = random_model()
        exact = np.asarray(run(state, batch, cotangent())[0])
    state = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), state)
    batch["patches"] = jnp.asarray(batch["patches"], jnp.bfloat16)
    features = jax.shard_map(
        lambda state, batch: nnx.merge(graph, state)(**batch),
        mesh=make_mesh(MeshConfig()),
        in_specs=(P(), spec("batch")),
        out_specs=spec("batch"),
    )
    rounded = jax.jit(features)(state, batch)
    assert rounded.dtype == jnp.bfloat16
    # bfloat16 rounds by 2^-9 at each of some twenty steps.
    error = np.asarray(rounded, np.float64) - exact
    assert np.sqrt(np.mean(error**2)) < 0.03 * np.sqrt(np.mean(exact**2))


def test_the_projector_starts_with_the_stated_spread():
    vision = dataclasses.replace(VISION, width=16)
    described = nnx.to_flat_state(nnx.state(Projector(vision, 64, jnp.float32)))
    arrays = initial_arrays({path[-1]: variable for path, variable in described}, jax.random.key(0))
    spreads = {name: np.std(leaf) for name, leaf in arrays.items()}
    assert spreads["up"] == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    assert spreads["down"] == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    assert spreads["norm"] == 0
