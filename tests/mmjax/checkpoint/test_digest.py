import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.checkpoint.digest import Digest, SliceDigest
from mmjax.config import MeshConfig
from mmjax.parallel.mesh import make_mesh

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int32", "int8", "int4", "uint8", "bool"]


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "device":
        monkeypatch.setattr("mmjax.checkpoint.digest._HOST_BYTES", -1)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_changed_element_changes_the_digest_and_equal_arrays_share_it(place: str, dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (3, 5))
    changed = [bits ^ (np.arange(15).reshape(3, 5) == number) for number in range(15)]
    texts = [Digest(jnp.asarray(array).astype(dtype)).text() for array in [bits, bits, *changed]]
    assert texts[0] == texts[1] and len(set(texts)) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_devices_give_the_same_digest(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [jnp.asarray(np.arange(-8, 8).reshape(shape)).astype(dtype) for shape in [(16,), (2, 4, 2)]]
    arrays.append(jnp.asarray(3).astype(dtype))
    on_host = [Digest(array).text() for array in arrays]
    monkeypatch.setattr("mmjax.checkpoint.digest._HOST_BYTES", -1)
    assert [Digest(array).text() for array in arrays] == on_host


def test_in_float64_the_last_bit_and_the_sign_of_zero_count(place: str) -> None:
    with jax.enable_x64(True):
        array = jnp.asarray([1.0, 0.0, jnp.nan], jnp.float64)
        changed = [array.at[0].set(np.nextafter(1.0, 2.0)), array.at[1].set(-0.0)]
        texts = [Digest(one).text() for one in (array, *changed)]
        assert len(set(texts)) == 3
        # The same on host and devices.
        assert texts[0] == "485c9b04d78b4461"


def test_exchanged_elements_change_the_digest(place: str) -> None:
    array = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    exchanged = (array, array[::-1], array[:, ::-1], array.reshape(6, 4).T.reshape(4, 6))
    assert len({Digest(one).text() for one in exchanged}) == 4


def test_the_digest_does_not_depend_on_the_sharding(place: str) -> None:
    array = jax.random.normal(jax.random.key(0), (16, 8))
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    specs = [PartitionSpec(), PartitionSpec("fsdp", "tensor"), PartitionSpec(None, "fsdp")]
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for spec in specs]
    assert {Digest(one).text() for one in placed} == {Digest(array).text()}


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_slices_in_any_order_give_the_digest_of_the_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several blocks a slice, rows and columns cut.
    monkeypatch.setattr("mmjax.checkpoint.digest._BLOCK_WORDS", 5)
    with jax.enable_x64(dtype == "float64"):
        array = jnp.asarray(np.arange(-60, 60).reshape(4, 5, 6)).astype(dtype)
        whole, values = Digest(array).text(), np.asarray(array)
        digest = SliceDigest()
        for where in ((slice(2, 4), slice(0, 5)), (slice(0, 2), slice(3, 5)), (slice(0, 2), slice(0, 3))):
            digest.add(values[where], (where[0].start, where[1].start, 0))
        assert digest.text() == whole
        moved = SliceDigest()
        moved.add(values[2:], (0, 0, 0))
        moved.add(values[:2], (2, 0, 0))
        assert moved.text() != whole
        scalar = SliceDigest()
        scalar.add(values[0, 0, 0], ())
        assert scalar.text() == Digest(array[0, 0, 0]).text()
