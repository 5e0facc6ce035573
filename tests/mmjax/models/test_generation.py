"""Tokens generated from caches are those of the whole row computed anew: every mixer, mesh and mixture of prompts."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    VisionConfig,
    describe_mesh,
)
from mmjax.data.batch import Batch
from mmjax.errors import NonFiniteError
from mmjax.models.generation import NO_TOKEN, Generator, Sampling, for_generation
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import variable_spec

VOCABULARY, PROMPT_TOKENS, CAPACITY, PATCHES = 64, 16, 24, 16

KIMI = ModelConfig(
    width=16,
    num_layers=5,
    vocabulary_size=VOCABULARY,
    full_attention_layers=(1, 3, 4),
    residual_block_layers=4,
    initializer_range=0.3,
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=4, value_width=6, decay_rank=4, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=2, query_rank=8, latent_width=8, nope_width=4, shared_key_width=2, value_width=4, query_chunk_tokens=8
    ),
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=0),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, patch_pixels=2),
    parameter_dtype="float64",
    compute_dtype="float64",
)
TEXT = dataclasses.replace(KIMI, num_layers=2, vision=VisionConfig(num_layers=0))
MODELS = {
    "kimi with pictures": KIMI,
    "two layers of kimi": dataclasses.replace(KIMI, num_layers=2, full_attention_layers=(1,)),
    "sparse attention beyond its top keys": dataclasses.replace(
        TEXT,
        full_attention_layers=(0, 1),
        full_attention=dataclasses.replace(
            KIMI.full_attention, query_rank=0, indexer=IndexerConfig(stage="sparse", head_width=4, top_k=5)
        ),
    ),
    "frame, row and column, deep features": dataclasses.replace(
        TEXT,
        full_attention_layers=(0, 1),
        full_attention_kind="grouped",
        residual="plain",
        grouped_attention=GroupedAttentionConfig(
            num_heads=4, num_key_heads=2, head_width=8, rotary=RotaryConfig(width=8, sections=(2, 1, 1))
        ),
        moe=dataclasses.replace(KIMI.moe, num_dense_layers=2, dense_width=16),
        vision=dataclasses.replace(KIMI.vision, kind="qwen3_vl", num_layers=2, deep_layers=(0,)),
    ),
    "low-rank gate, softplus decay": dataclasses.replace(
        TEXT,
        full_attention_layers=(),
        linear_attention=dataclasses.replace(
            KIMI.linear_attention, decay="softplus", output_gate="low_rank", output_gate_rank=4
        ),
    ),
    "llama": dataclasses.replace(
        TEXT,
        full_attention_layers=(0, 1),
        full_attention_kind="grouped",
        residual="plain",
        tied_head=True,
        activation=ActivationConfig(kind="silu"),
        grouped_attention=GroupedAttentionConfig(
            num_heads=4, num_key_heads=2, head_width=8, rotary=RotaryConfig(width=8)
        ),
        moe=dataclasses.replace(KIMI.moe, num_dense_layers=2, dense_width=16),
    ),
    "gated delta net": dataclasses.replace(
        TEXT,
        full_attention_layers=(1,),
        full_attention_kind="grouped",
        linear_attention_kind="gated_delta_net",
        residual="plain",
        norm_scale="zero_centred",
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=1, num_value_heads=2, key_width=4, value_width=6, chunk_tokens=16
        ),
        grouped_attention=GroupedAttentionConfig(
            num_heads=2,
            num_key_heads=1,
            head_width=8,
            head_norm=True,
            output_gate="sigmoid",
            rotary=RotaryConfig(width=4),
        ),
    ),
    "turning sparse attention, several streams": dataclasses.replace(
        TEXT,
        full_attention_layers=(0, 1),
        residual="hyper",
        full_attention=dataclasses.replace(
            KIMI.full_attention,
            rotary=RotaryConfig(width=2, pairs="interleaved"),
            indexer=IndexerConfig(stage="sparse", head_width=4, top_k=5, rotary=RotaryConfig(width=2)),
        ),
    ),
}


def prompts(lengths: Sequence[int], *, pictures: Sequence[int] = (), row_tokens: int = PROMPT_TOKENS) -> Batch:
    """One row a prompt, padded; `pictures` rows have one of 2 x 4 patches behind their first token. Padding is junk."""
    random, rows = np.random.default_rng(0), len(lengths)
    places, patches = (rows, row_tokens), (rows, PATCHES if pictures else 0)
    batch = Batch(
        tokens=random.integers(0, VOCABULARY, (9, 40), dtype=np.int32)[:rows, :row_tokens],
        targets=np.zeros(places, np.int32),
        loss_weight=np.zeros(places, np.float32),
        segment_ids=(np.arange(row_tokens)[None] < np.array(lengths)[:, None]).astype(np.int32),
        positions=np.tile(np.arange(row_tokens, dtype=np.int32), (rows, 1)),
        feature_index=np.full(places, -1, np.int32),
        patches=random.normal(size=(9, PATCHES, 12)).astype(np.float32)[:rows, : patches[1]],
        patch_segment_ids=np.zeros(patches, np.int32),
        patch_position=np.zeros((*patches, 3), np.int32),
        patch_grid=np.ones((*patches, 3), np.int32),
        patch_feature=np.full((rows, patches[1] // 4), -1, np.int32),
        spectrograms=np.zeros((rows, 0, 0, 0), np.float32),
        sound_index=np.full(places, -1, np.int32),
    )
    for row in pictures:
        batch.feature_index[row, 1:3] = 0, 1
        batch.patch_segment_ids[row, :8] = 1
        batch.patch_position[row, :8] = [(0, r, c + w) for w in (0, 2) for r in (0, 1) for c in (0, 1)]
        batch.patch_grid[row, :8] = 1, 2, 4
        batch.patch_feature[row, :2] = 0, 1
    return batch


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    return Batch(*(array[list(rows)] for array in batch))


@functools.cache
def make_arrays(name: str, mesh_config: MeshConfig):
    model = for_generation(MODELS[name])
    definition, mesh = define(model), make_mesh(mesh_config)

    def random_array(path, array):
        if path.endswith((".query", ".bias")) and "mixer." not in path:
            # Zero at the start: residual queries and router biases.
            return jnp.cos(jnp.arange(array.size, dtype=array.dtype)).reshape(array.shape)
        return array

    placed = []
    for variables in (definition.parameters, definition.router_biases, definition.frozen):
        arrays = initial_arrays(variables, jax.random.key(0))
        shardings = {
            path: jax.sharding.NamedSharding(mesh, variable_spec(v, mesh.shape)) for path, v in variables.items()
        }
        placed.append({p: jax.device_put(random_array(p, array), shardings[p]) for p, array in arrays.items()})
    return definition, tuple(placed), mesh


@functools.cache
def make_generator(name: str, mesh_config: MeshConfig = MeshConfig()) -> Generator:  # noqa: B008
    return Generator(*make_arrays(name, mesh_config), num_tokens=VOCABULARY)


def generate(name: str, batch: Batch, steps: int = 7, mesh: MeshConfig = MeshConfig(), **options):  # noqa: B008
    """(tokens [B, steps], logits [B, steps, W])."""
    options = {"sampling": Sampling(), **options}
    stream = make_generator(name, mesh).stream(batch, max_new_tokens=steps, capacity=CAPACITY, **options)
    found = [(step.tokens, np.asarray(step.logits)) for step in stream]
    return tuple(np.stack(part, axis=1) for part in zip(*found, strict=True))


def logits_anew(name: str, batch: Batch, tokens: np.ndarray) -> np.ndarray:
    """[B, steps, W]: what each of `tokens` [B, steps] was to be chosen from, by the whole rows without a cache."""
    definition, arrays, mesh = make_arrays(name, MeshConfig())
    steps = tokens.shape[1]
    longer = prompts(
        [0] * len(tokens), pictures=range(len(tokens)) if batch.patches.shape[1] else (), row_tokens=CAPACITY
    )
    longer = longer._replace(**{field: getattr(batch, field) for field in Batch._fields if field.startswith("patch")})
    lengths = (batch.segment_ids > 0).sum(axis=1)
    longer.feature_index[:] = -1
    longer.feature_index[:, :PROMPT_TOKENS] = batch.feature_index
    for row, length in enumerate(lengths):
        longer.tokens[row, :length] = batch.tokens[row, :length]
        longer.tokens[row, length : length + steps] = tokens[row]
        longer.segment_ids[row, : length + steps] = 1
    whole = jax.sharding.PartitionSpec()

    def forward(arrays, batch):
        model = definition.assemble(*arrays)
        hidden, _ = model(batch)
        return jnp.einsum("bsd,dw->bsw", hidden, model.decoder.head_weights(hidden.dtype))

    forward = jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    logits = np.asarray(forward(arrays, longer))
    return np.stack([logits[row, length - 1 : length + steps - 1] for row, length in enumerate(lengths)])


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", [name for name in MODELS if name != "two layers of kimi"])
def test_cached_tokens_and_logits_are_those_of_the_whole_row_computed_anew(name):
    batch = prompts([3, 16, 9], pictures=[0, 1] if MODELS[name].vision.is_present else ())
    tokens, logits = generate(name, batch)
    expected = logits_anew(name, batch, tokens)
    assert np.abs(logits - expected).max() <= 1e-9
    np.testing.assert_array_equal(tokens, expected.argmax(axis=-1))
    # Not one token over and over, which any state would give.
    assert len(np.unique(tokens)) > 3


def test_prompts_of_different_lengths_in_one_batch_give_what_each_gives_alone():
    name, batch = "two layers of kimi", prompts([3, 16, 9], pictures=[0, 1])
    tokens, logits = generate(name, batch)
    for row in range(3):
        # Beside rows of padding, which have ended from the start.
        alone = rows_of(batch, [row, row, row])
        alone.segment_ids[1:] = 0
        alone_tokens, alone_logits = generate(name, alone)
        assert np.abs(alone_logits[0] - logits[row]).max() <= 1e-12
        np.testing.assert_array_equal(alone_tokens[0], tokens[row])
        assert (alone_tokens[1:] == NO_TOKEN).all()


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(tensor=2),
        MeshConfig(expert=2),
        pytest.param(MeshConfig(fsdp=2, expert=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=describe_mesh,
)
def test_a_mesh_gives_the_tokens_and_logits_of_one_device(mesh):
    name, batch = "two layers of kimi", prompts([3, 16, 9, 0], pictures=[0, 1])
    tokens, logits = generate(name, rows_of(batch, [0, 1, 2]))
    split_tokens, split_logits = generate(name, batch, mesh=mesh)
    assert np.abs(split_logits[:3] - logits).max() <= 1e-9
    np.testing.assert_array_equal(split_tokens[:3], tokens)
    assert (split_tokens[3] == NO_TOKEN).all()


def test_a_row_ends_with_a_stop_token_and_the_others_go_on():
    batch = prompts([3, 16, 9])
    tokens, logits = generate("llama", batch)
    stop = int(tokens[1, 2])
    first = [(row == stop).argmax() if stop in row else len(row) for row in tokens]
    stopped, stopped_logits = generate("llama", batch, stop_tokens=(stop,))
    for row, end in enumerate(first):
        np.testing.assert_array_equal(stopped[row, : end + 1], tokens[row, : end + 1])
        assert (stopped[row, end + 1 :] == NO_TOKEN).all()
        assert np.abs(stopped_logits[row, : end + 1] - logits[row, : end + 1]).max() <= 1e-12
    assert min(first) == first[1] == 2 < max(first)
    ended, _ = generate("llama", rows_of(batch, [1, 1, 1]), stop_tokens=(stop,))
    assert ended.shape == (3, 3)


def test_draws_are_a_function_of_seed_prompt_and_token_alone():
    batch, sampling = prompts([3, 16, 9]), Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
    tokens, logits = generate("llama", batch, sampling=sampling)
    again, _ = generate("llama", rows_of(batch, [2, 0, 1]), sampling=sampling, prompt_numbers=[2, 0, 1])
    np.testing.assert_array_equal(again, tokens[[2, 0, 1]])
    other, _ = generate("llama", batch, sampling=dataclasses.replace(sampling, seed=4))
    assert (other != tokens).any()
    np.testing.assert_array_equal(
        generate("llama", batch, sampling=dataclasses.replace(sampling, top_k=1))[0], generate("llama", batch)[0]
    )
    # Every token drawn is one of the nucleus.
    scaled = np.sort(logits / 1.5, axis=-1)[..., ::-1][..., :20]
    probability = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probability /= probability.sum(axis=-1, keepdims=True)
    size = ((np.cumsum(probability, axis=-1) - probability) < 0.9).sum(axis=-1)
    rank = (logits > np.take_along_axis(logits, tokens[..., None], axis=-1)).sum(axis=-1)
    assert (rank < size).all() and rank.max() > 0


def test_draws_follow_the_probabilities_and_never_take_a_token_without_text():
    from mmjax.models.generation import _Choice, choose

    rows = 4000
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (rows, 1))
    choice = _Choice(
        np.uint32(1), np.arange(rows, dtype=np.uint32), np.int32([]), np.float32(1), np.int32(4), np.float32(0.9)
    )
    drawn = np.asarray(jax.jit(functools.partial(choose, is_greedy=False))(logits, choice, 0))
    share = np.bincount(drawn, minlength=4) / rows
    assert np.abs(share - np.array([0.5, 0.3, 0.15, 0]) / 0.95).max() < 0.03 and share[3] == 0
    generator = Generator(*make_arrays("llama", MeshConfig()), num_tokens=5)
    stream = generator.stream(prompts([3, 16, 9]), max_new_tokens=4, capacity=CAPACITY, sampling=Sampling())
    assert max(step.tokens.max() for step in stream) < 5


def test_longer_prompts_and_other_settings_of_one_size_compile_nothing_anew():
    generator = make_generator("llama")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, _, **about: (
            compiled.append(about.get("fun_name")) if event.endswith("/backend_compile_duration") else None
        )
    )
    try:
        for lengths, temperature in (([3, 2, 1], 0.0), ([16, 1, 9], 0.0), ([5, 5, 5], 0.7), ([6, 5, 5], 1.3)):
            sampling = Sampling(temperature=temperature, top_k=int(7 * temperature), seed=lengths[0])
            for _ in generator.stream(
                prompts(lengths), max_new_tokens=4, capacity=CAPACITY, stop_tokens=lengths, sampling=sampling
            ):
                pass
            if lengths == [3, 2, 1]:
                compiled.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    # The two programs that draw, unless the test before has compiled them.
    assert sorted(filter(None, compiled)) in ([], ["jit(_advance)", "jit(_advance_one)"])


def test_logits_that_are_no_numbers_and_prompts_too_long_are_errors():
    definition, (parameters, biases, frozen), mesh = make_arrays("llama", MeshConfig())
    broken = parameters | {"decoder.norm": jnp.full_like(parameters["decoder.norm"], np.nan)}
    generator = Generator(definition, (broken, biases, frozen), mesh, VOCABULARY)
    with pytest.raises(NonFiniteError, match="no numbers at token 1"):
        next(generator.stream(prompts([3, 16, 9]), max_new_tokens=4, capacity=CAPACITY, sampling=Sampling()))
    with pytest.raises(ValueError, match="exceed the capacity of 24"):
        next(generator.stream(prompts([3, 16, 9]), max_new_tokens=9, capacity=CAPACITY, sampling=Sampling()))
