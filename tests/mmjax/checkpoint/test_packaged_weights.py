"""Real weights out of a package, where `silero-vad` is installed: a file that others trained and wrote.

Its network (a voice detector of convolutions and an LSTM) is none of our families and is not run. Shown is that our
reader and writer of safetensors deal with a file from outside as the library of that name does.
"""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mmjax.checkpoint.safetensors_files import MappedFiles, read_header, write_file

# Of silero-vad 6.2.3.
DIGEST = "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1"


@pytest.fixture(scope="module")
def file() -> Path:
    # Found, not imported: the package imports torchaudio.
    package = importlib.util.find_spec("silero_vad")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package silero-vad")
    path = Path(package.submodule_search_locations[0]) / "data" / "silero_vad_16k.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGEST, "another version than 6.2.3"
    return path


def test_packaged_weights_are_read_as_by_the_safetensors_library(file):
    expected = pytest.importorskip("safetensors.numpy").load_file(file)
    tensors, _ = read_header(file)
    mapped = MappedFiles()
    assert tensors.keys() == expected.keys() and len(expected) == 15
    for name, array in expected.items():
        ours = mapped.read(tensors[name])
        assert (ours.dtype, ours.shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(ours, array, err_msg=name)
        assert np.isfinite(ours).all() and ours.any(), name


def test_packaged_weights_are_written_to_the_same_bytes(file, tmp_path):
    tensors, metadata = read_header(file)
    mapped = MappedFiles()
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    values = ((name, iter([mapped.read(tensor)])) for name, tensor in tensors.items())
    write_file(tmp_path / "again.safetensors", entries, values, metadata)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
