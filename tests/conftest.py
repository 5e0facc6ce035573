"""Settings of all tests: 8 virtual CPU devices (or the GPUs, with --gpu), strict promotion, a compilation cache."""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("MMJAX_TEST_CACHE", str(Path(tempfile.gettempdir()) / f"mmjax-test-cache-{os.getuid()}")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--gpu", action="store_true", help="run the tests marked gpu, multigpu if there are several, mesh if 8"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Not from `sys.argv`, which workers of xdist do not share.
    if not config.getoption("--gpu"):
        # Most of a test's time is compilation: unoptimised programs compile in half of it, and with the older emitters
        # of fusions in a third of that; in one piece instead of 32 they take a third less again. Read when JAX first
        # looks for devices.
        compile_fast = (
            "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {compile_fast}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_gpu_run, is_slow_run = config.getoption("--gpu"), config.getoption("--slow")
    for item in items:
        if reason := _reason_to_skip(
            {mark.name for mark in item.iter_markers()}, is_gpu_run=is_gpu_run, is_slow_run=is_slow_run
        ):
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip(marks: set[str], *, is_gpu_run: bool, is_slow_run: bool) -> str | None:
    if "deviceless" in marks and not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        return "needs the extra deviceless"
    if "multigpu" in marks:
        return None if is_gpu_run and jax.device_count() > 1 else "needs several GPUs and --gpu"
    if "gpu" in marks:
        return None if is_gpu_run else "needs a GPU and --gpu"
    if is_gpu_run and "mesh" not in marks:
        return "not a GPU test"
    if is_gpu_run and jax.device_count() < 8:
        return "needs 8 GPUs"
    return "run with --slow" if "slow" in marks and not is_slow_run else None


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """For programs of described devices, which the cache writes and cannot read again."""
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def described_gpus(no_compilation_cache: None) -> list[jax.Device]:
    """Two H200 that need not be there: programs can be compiled for them."""
    pytest.importorskip("jax_cuda13_plugin")
    from mmjax.config import MeshConfig
    from mmjax.parallel.described import described_mesh
    from mmjax.planner.topology import read_cluster

    return list(described_mesh(MeshConfig(fsdp=2), read_cluster("1x2xh200")).devices.flat)


@pytest.fixture
def one_device() -> Callable:
    """`one_device(f)` runs `f` on whole arrays inside `shard_map` over a mesh of one device, as all model code runs."""
    from mmjax.config import MeshConfig
    from mmjax.parallel.mesh import make_mesh

    mesh = make_mesh(MeshConfig())

    def wrap(function: Callable) -> Callable:
        # On one device every sum over a mesh axis is the identity, so unchecked gradients are right too.
        return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)

    return wrap


@pytest.fixture(scope="session")
def make_batch() -> Callable:
    """`make_batch(model, rows=8, row_tokens=24, row_patches=24, seed=0, empty_rows=0)`: a random packed batch.

    Rows hold uneven documents with 0, 1 or 2 images of several shapes and end in padding; the last `empty_rows` rows
    are nothing but padding, filled with arbitrary tokens and patches that must not matter.
    """
    return _random_batch


def _random_batch(model, *, rows=8, row_tokens=24, row_patches=24, seed=0, empty_rows=0):
    import numpy as np

    from mmjax.data.batch import Batch

    random = np.random.default_rng(seed)
    patch_values = model.vision.patch_values
    batch = Batch(
        tokens=random.integers(0, model.vocabulary_size, (rows, row_tokens), dtype=np.int32),
        targets=random.integers(0, model.vocabulary_size, (rows, row_tokens), dtype=np.int32),
        loss_weight=np.zeros((rows, row_tokens), np.float32),
        segment_ids=np.zeros((rows, row_tokens), np.int32),
        positions=np.zeros((rows, row_tokens), np.int32),
        feature_index=np.full((rows, row_tokens), -1, np.int32),
        patches=random.normal(size=(rows, row_patches, patch_values)).astype(np.float32),
        patch_segment_ids=np.zeros((rows, row_patches), np.int32),
        patch_position=np.zeros((rows, row_patches, 3), np.int32),
        patch_grid=np.ones((rows, row_patches, 3), np.int32),
        patch_feature=np.full((rows, row_patches // 4), -1, np.int32),
        spectrograms=np.zeros((rows, 0, 0, 0), np.float32),
        sound_index=np.full((rows, row_tokens), -1, np.int32),
    )
    for row in range(rows - empty_rows):
        token, patch, image = 0, 0, 0
        for document in range(1, 100):
            length = int(random.integers(1, row_tokens // 2))
            if token + length > row_tokens - int(random.integers(0, 4)):
                break
            here = slice(token, token + length)
            batch.segment_ids[row, here] = document
            batch.positions[row, here] = np.arange(length)
            batch.loss_weight[row, here] = random.random(length) < 0.6
            batch.loss_weight[row, token + length - 1] = 0
            placed = token
            for _ in range(int(random.integers(0, 3))):
                height, width = 2 * random.integers(1, 3, 2)
                num_patches, num_features = height * width, height * width // 4
                if patch + num_patches > row_patches or placed + num_features >= token + length:
                    continue
                image += 1
                groups = [(r, c) for r in range(0, height, 2) for c in range(0, width, 2)]
                order = [(0, r + dr, c + dc) for r, c in groups for dr in (0, 1) for dc in (0, 1)]
                batch.patch_segment_ids[row, patch : patch + num_patches] = image
                batch.patch_position[row, patch : patch + num_patches] = order
                batch.patch_grid[row, patch : patch + num_patches] = (1, height, width)
                features = np.arange(patch // 4, patch // 4 + num_features)
                batch.patch_feature[row, features] = features
                batch.feature_index[row, placed : placed + num_features] = features
                patch, placed = patch + num_patches, placed + num_features
            token += length
    return batch
