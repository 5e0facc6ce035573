"""Which tensors a released checkpoint must have, from its config.json alone."""

from pathlib import Path

import numpy as np

from mmjax.checkpoint.matching import match
from mmjax.checkpoint.safetensors_files import StoredTensor
from mmjax.models.families.kimi_k3 import read_config, released_tensors
from tests.mmjax.models.families.test_kimi_k3 import RELEASED

WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True}
PACKING = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": None}},
}


def test_kimi_k3_is_the_497_220_tensors_that_its_config_promises_and_no_others():
    config = RELEASED | {"text_config": RELEASED["text_config"] | {"quantization_config": PACKING}}
    stored: dict[str, StoredTensor] = {}

    def store(name: str, dtype: type, *shape: int) -> None:
        stored[name] = StoredTensor(name, Path("shard"), np.dtype(dtype), shape, 0)

    for tensor in released_tensors(read_config(RELEASED)):
        if ".experts." not in tensor.name:
            store(tensor.name, np.float32, *tensor.shape)
            continue
        stem, (rows, columns) = tensor.name.removesuffix(".weight"), tensor.shape
        store(f"{stem}.weight_packed", np.uint8, rows, columns // 2)
        store(f"{stem}.weight_scale", np.uint8, rows, columns // 32)
    counts = [sum(name.endswith(ending) for name in stored) for ending in ("_packed", "_scale")]
    assert (len(stored), counts) == (497_220, [247_296, 247_296])
    found = match("K3", config, stored, keeps_packed=True)
    assert found.model.moe.expert_storage == "mxfp4" and not found.buffers and found.head_copy is None
    assert {name for one in found.matches for name in one.sources.values()} == stored.keys()
    codes = {path: target.shape for path, target in found.targets.items() if path.endswith("_codes")}
    assert sum(shape[0] * shape[1] for shape in codes.values()) == 247_296
