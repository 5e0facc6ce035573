"""What all families are compared by: the same tokens through transformers and through ours, both in float64."""

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.checkpoint.peft import export_adapter, read_adapter
from mmjax.data.batch import Batch
from mmjax.models.families.released import from_released, to_released
from mmjax.models.lora import define_adapted, match, merge
from mmjax.models.multimodal import define

LENGTHS = (19, 14)
ROW_TOKENS = 36


@pytest.fixture
def in_float64(monkeypatch) -> Callable:
    """`in_float64(module, ...)`: modelling code of transformers computes in float64 where it says float32."""
    torch = pytest.importorskip("torch")

    class WideTorch(types.ModuleType):
        def __getattr__(self, name: str):
            return getattr(torch, "float64" if name in ("float32", "float") else name)

    def widen(*modules) -> None:
        for module in modules:
            monkeypatch.setattr(module, "torch", WideTorch("torch"))
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return widen


@pytest.fixture
def randomise() -> Callable:
    """`randomise(model, large=())`: numbers that show every fault, larger where a name has one of `large` in it."""
    torch = pytest.importorskip("torch")

    def fill(model, *, large: tuple[str, ...] = ()):
        random = torch.Generator().manual_seed(3)
        model.eval().double()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" in name or not tensor.is_floating_point():
                    continue
                noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
                if "norm" in name and name.endswith("weight"):
                    tensor.add_(0.2 * noise)
                elif "A_log" in name or "dt_bias" in name:
                    tensor.add_(0.3 * noise)
                else:
                    tensor.copy_((0.5 if any(part in name for part in large) else 0.15) * noise)
        return model

    return fill


@dataclasses.dataclass
class Released:
    """A model that transformers saved: what lies in its folder."""

    folder: Path
    config: dict
    tensors: dict[str, np.ndarray]


@pytest.fixture
def save(tmp_path) -> Callable:
    """`save(model)`: the folder that `save_pretrained` writes, and its content."""
    numpy = pytest.importorskip("safetensors.numpy")

    def run(model) -> Released:
        model.save_pretrained(tmp_path / "released")
        tensors: dict[str, np.ndarray] = {}
        for file in sorted((tmp_path / "released").glob("*.safetensors")):
            tensors |= numpy.load_file(file)
        return Released(tmp_path / "released", json.loads((tmp_path / "released" / "config.json").read_text()), tensors)

    return run


@pytest.fixture
def ours_in_float64() -> Callable:
    """`ours_in_float64(family, released)`: (our settings in float64, parameters, router biases); names are checked."""

    def read(family, released: Released):
        model = dataclasses.replace(
            family.read_config(released.config), parameter_dtype="float64", compute_dtype="float64"
        )
        expected = list(family.released_tensors(model))
        canonical_name = getattr(family, "canonical_name", str)
        is_left_out = getattr(family, "is_left_out", lambda model, name: False)
        tensors = {canonical_name(n): t for n, t in released.tensors.items() if not is_left_out(model, n)}
        assert {tensor.name: tensor.shape for tensor in expected} == {n: t.shape for n, t in tensors.items()}
        parameters, biases = from_released(model, expected, tensors)
        back = to_released(expected, parameters | biases)
        for name, tensor in tensors.items():
            assert back[name].shape == tensor.shape and np.array_equal(back[name], tensor), name
        return model, parameters, biases

    return read


def text_batch(vocabulary_size: int, *, is_packed: bool) -> Batch:
    """Two documents: each in a row of its own with padding behind, or both in each row, in either order."""
    random = np.random.default_rng(0)
    documents = [random.integers(3, vocabulary_size, length) for length in LENGTHS]
    layout = [[0, 1], [1, 0]] if is_packed else [[0], [1]]
    shape = (2, ROW_TOKENS)
    batch = Batch(
        tokens=np.full(shape, 1, np.int32),
        targets=np.zeros(shape, np.int32),
        loss_weight=np.zeros(shape, np.float32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        feature_index=np.full(shape, -1, np.int32),
        patches=np.zeros((2, 8, 48), np.float32),
        patch_segment_ids=np.zeros((2, 8), np.int32),
        patch_position=np.zeros((2, 8, 3), np.int32),
        patch_grid=np.ones((2, 8, 3), np.int32),
        patch_feature=np.full((2, 2), -1, np.int32),
        spectrograms=np.zeros((2, 0, 0, 0), np.float32),
        sound_index=np.full(shape, -1, np.int32),
    )
    for row, numbers in enumerate(layout):
        start = 0
        for segment, number in enumerate(numbers, start=1):
            length = len(documents[number])
            here = slice(start, start + length)
            batch.tokens[row, here] = documents[number]
            batch.targets[row, start : start + length - 1] = documents[number][1:]
            batch.loss_weight[row, start : start + length - 1] = 1
            batch.segment_ids[row, here] = segment
            batch.positions[row, here] = np.arange(length)
            start += length
    return batch


@pytest.fixture
def text_parity(in_float64, save, ours_in_float64, one_device) -> Callable:
    """`text_parity(family, theirs, bound=1e-9)`: the same tensors, out and back, logits, loss, gradient, packed rows.

    Returns our settings. `theirs` is a causal model in float64 whose modelling code computes in float64 too.
    """
    torch = pytest.importorskip("torch")

    def check(family, theirs, *, bound: float = 1e-9):
        released = save(theirs)
        with jax.enable_x64(True):
            model, parameters, biases = ours_in_float64(family, released)
            batch = text_batch(model.vocabulary_size, is_packed=False)
            expected = run_theirs(theirs, batch)
            program = jax.jit(one_device(make_program(model)))
            ours = jax.device_get(program(parameters, biases, batch))
            compare(ours, expected, batch, bound)

            packed = text_batch(model.vocabulary_size, is_packed=True)
            loss, logits, gradient = jax.device_get(program(parameters, biases, packed))
            # Every document twice: the mean loss is the same, each copy's gradient is half.
            assert abs(loss - ours[0]) <= 1e-11 * abs(loss)
            for row, order in enumerate(((0, 1), (1, 0))):
                start = 0
                for number in order:
                    here, alone = slice(start, start + LENGTHS[number]), slice(0, LENGTHS[number])
                    assert np.abs(logits[row, here] - ours[1][number, alone]).max() <= 1e-11 * np.abs(logits).max()
                    difference = np.abs(2 * gradient[row, here] - ours[2][number, alone]).max()
                    assert difference <= 1e-11 * np.abs(ours[2]).max()
                    start += LENGTHS[number]
        return model

    def run_theirs(theirs, batch: Batch):
        embeddings = theirs.get_input_embeddings()(torch.tensor(batch.tokens)).detach().requires_grad_()
        mask = torch.tensor((batch.segment_ids > 0).astype(np.int64))
        logits = theirs(inputs_embeds=embeddings, attention_mask=mask).logits
        counts = torch.tensor(batch.loss_weight > 0)
        loss = torch.nn.functional.cross_entropy(logits[counts], torch.tensor(batch.targets)[counts].long())
        loss.backward()
        return loss.item(), logits.detach().numpy(), embeddings.grad.numpy()

    return check


@pytest.fixture
def picture_parity(save, ours_in_float64, one_device, tmp_path) -> Callable:
    """`picture_parity(family, theirs, alone, inputs, packed, places, bound=1e-9)` -> our settings.

    Of a model in float64 whose modelling code computes in float64: the same tensors, out and back; logits, loss and
    gradient of the token embeddings of the batch `alone` (a sample a row), for which transformers gets `inputs`; and
    the gradient of every released tensor. In the batch `packed`, sample k lies at `places[k]` = (row, first position):
    the same logits there. Without pictures the tower gets a gradient of zero. `vendor` turns saved tensors into those
    of a vendor's file.
    """
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.numpy").load_file

    def check(
        family, theirs, alone: Batch, inputs: dict, packed: Batch, places, *, bound: float = 1e-9, vendor=lambda t: t
    ):
        released = save(theirs)
        released.tensors = vendor(released.tensors)
        with jax.enable_x64(True):
            model, parameters, biases = ours_in_float64(family, released)
            program = jax.jit(one_device(make_picture_program(model)))
            expected = run_theirs(theirs, alone, inputs)
            ours, gradients = jax.device_get(program(parameters, biases, alone))
            compare(ours, expected, alone, bound)
            compare_gradients(theirs, to_released(family.released_tensors(model), gradients | biases), vendor, bound)
            (_, logits, _), _ = jax.device_get(program(parameters, biases, packed))
            for row, (there, start) in enumerate(places):
                length = int((alone.segment_ids[row] > 0).sum())
                difference = np.abs(logits[there, start : start + length] - ours[1][row, :length]).max()
                assert difference <= 1e-10 * np.abs(logits).max()
            text = without_pictures(alone)
            (loss, _, _), gradients = jax.device_get(program(parameters, biases, text))
            tower = [g for path, g in gradients.items() if path.startswith(("vision.", "projector."))]
            assert np.isfinite(loss) and tower and all((gradient == 0).all() for gradient in tower)
        return model

    def run_theirs(theirs, batch: Batch, inputs: dict):
        kept = []

        def keep(_, __, output):
            output.retain_grad()
            kept.append(output)

        hook = theirs.get_input_embeddings().register_forward_hook(keep)
        mask = torch.tensor((batch.segment_ids > 0).astype(np.int64))
        logits = theirs(input_ids=torch.tensor(batch.tokens).long(), attention_mask=mask, **inputs).logits
        hook.remove()
        counts = torch.tensor(batch.loss_weight > 0)
        loss = torch.nn.functional.cross_entropy(logits[counts], torch.tensor(batch.targets)[counts].long())
        loss.backward()
        return loss.item(), logits.detach().numpy(), kept[0].grad.numpy()

    def compare_gradients(theirs, ours: dict, vendor: Callable, bound: float) -> None:
        # Saved like weights, so that they get the names and layouts of a released file.
        with torch.no_grad():
            for weight in theirs.parameters():
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        theirs.save_pretrained(tmp_path / "gradients")
        expected = vendor(load(tmp_path / "gradients" / "model.safetensors"))
        errors = {name: np.abs(ours[name] - gradient).max() for name, gradient in expected.items()}
        largest = max(np.abs(gradient).max() for gradient in expected.values())
        assert max(errors.values()) <= bound * largest, sorted(errors.items(), key=lambda item: -item[1])[:5]

    def without_pictures(batch: Batch) -> Batch:
        return batch._replace(
            feature_index=np.full_like(batch.feature_index, -1),
            patch_segment_ids=np.zeros_like(batch.patch_segment_ids),
            patch_feature=np.full_like(batch.patch_feature, -1),
        )

    return check


def random_factors(definition) -> dict[str, np.ndarray]:
    """Large ones in float64, with values that float32 holds."""
    random = np.random.default_rng(1)
    return {
        path: random.normal(size=v.get_value().shape, scale=0.3).astype(np.float32).astype(np.float64)
        for path, v in definition.parameters.items()
    }


@pytest.fixture
def peft_parity(save, ours_in_float64, one_device, tmp_path) -> Callable:
    """`peft_parity(family, theirs, lora, batch, inputs={})`: stock peft gives our logits, and what it saves comes back.

    Of a model in float64 whose modelling code computes in float64: for the batch, for which transformers gets `inputs`
    beside its tokens, peft on what we export gives the logits of our adapters, and so do we with them merged. `vendor`
    as above.
    """
    torch, peft = map(pytest.importorskip, ("torch", "peft"))

    def check(family, theirs, lora, batch: Batch, inputs: dict | None = None, *, vendor=lambda t: t):
        released, is_real = save(theirs), batch.segment_ids > 0
        released.tensors = vendor(released.tensors)
        kind = released.config["model_type"]
        with jax.enable_x64(True):
            model, parameters, biases = ours_in_float64(family, released)
            tensors = list(family.released_tensors(model))
            matched = match(model, lora, tensors)
            definition = define_adapted(model, lora, matched)
            factors = random_factors(definition)

            def logits(definition):
                @jax.jit
                @one_device
                def run(parameters, biases, frozen, batch):
                    assembled = definition.assemble(parameters, biases, frozen)
                    hidden, _ = assembled(batch)
                    return jnp.einsum("bsd,dv->bsv", hidden, assembled.decoder.head_weights(hidden.dtype))

                return lambda *arrays: np.asarray(run(*arrays, batch))[is_real]

            ours, plain = logits(definition)(factors, biases, parameters), logits(define(model))
            whole = merge(model, lora, matched, factors, parameters)
            merged = {path: np.asarray(array) for path, array in whole.items()}
            merged_logits, base_logits = plain(merged, biases, {}), plain(parameters, biases, {})
        export_adapter(tmp_path / "adapter", model, lora, matched, tensors, kind, factors)
        theirs.requires_grad_(False)
        given = {"input_ids": torch.tensor(batch.tokens).long(), **(inputs or {})}
        given["attention_mask"] = torch.tensor(is_real.astype(np.int64))
        assert np.abs(theirs(**given).logits.numpy()[is_real] - base_logits).max() <= 1e-9 * np.abs(base_logits).max()
        # Keys that are missing or left over are warnings of peft, which are errors here.
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        scale = np.abs(ours).max()
        error = np.abs(adapted(**given).logits.numpy()[is_real] - ours).max() / scale
        print(f"{kind}: {len(matched)} projections, peft {error:.1e}")
        assert error <= 1e-9
        assert np.abs(merged_logits - ours).max() <= 1e-12 * scale
        assert np.abs(base_logits - ours).max() > 0.05 * scale

        again = read_adapter(tmp_path / "adapter", model, lora, matched, tensors, kind)
        assert again.keys() == factors.keys()
        for path, factor in factors.items():
            np.testing.assert_array_equal(again[path], factor, err_msg=path)
        # What peft itself saves is read too.
        adapted.save_pretrained(tmp_path / "theirs")
        for path, factor in read_adapter(tmp_path / "theirs", model, lora, matched, tensors, kind).items():
            np.testing.assert_array_equal(factor, factors[path], err_msg=path)
        return matched

    return check


def make_picture_program(model) -> Callable:
    """`(parameters, biases, batch) -> ((mean loss, logits, gradient of the embeddings), gradients of parameters)`."""
    definition = define(model)

    def run(parameters, biases, batch: Batch):
        def loss_of(parameters, shift):
            network = definition.assemble(parameters, biases)
            hidden, _ = network.from_embeddings(network.decoder.embed(batch.tokens) + shift, batch)
            logits = jnp.einsum("bsd,dw->bsw", hidden, network.decoder.head_weights(hidden.dtype))
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
            weight = batch.loss_weight.astype(logits.dtype)
            return -jnp.sum(weight * picked) / jnp.sum(weight), logits

        shift = jnp.zeros((*batch.tokens.shape, model.width), model.compute_dtype)
        (loss, logits), (gradients, gradient) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
            parameters, shift
        )
        return (loss, logits, gradient), gradients

    return run


def make_program(model) -> Callable:
    """`(parameters, biases, batch) -> (mean loss, logits, gradient of the embeddings)`."""
    definition = define(model)

    def run(parameters, biases, batch: Batch):
        network = definition.assemble(parameters, biases)

        def loss_of(embeddings):
            hidden, _ = network.decoder(embeddings, batch.segment_ids, batch.positions)
            logits = jnp.einsum("bsd,dw->bsw", hidden, network.decoder.head_weights(hidden.dtype))
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
            weight = batch.loss_weight.astype(logits.dtype)
            return -jnp.sum(weight * picked) / jnp.sum(weight), logits

        (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(network.decoder.embed(batch.tokens))
        return loss, logits, gradient

    return run


def compare(ours, expected, batch: Batch, bound: float) -> None:
    is_real = batch.segment_ids > 0
    errors = {
        name: float(np.abs(mine - theirs).max() / np.abs(theirs).max())
        for name, mine, theirs in (
            ("loss", ours[0], np.asarray(expected[0])),
            ("logits", ours[1][is_real], expected[1][is_real]),
            ("gradient", ours[2][is_real], expected[2][is_real]),
        )
    }
    print(errors)
    assert max(errors.values()) <= bound, errors
