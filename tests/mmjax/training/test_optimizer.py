"""The optimizer against NumPy: which parameters are matrices, Muon matrix by matrix, AdamW, clipping, schedule."""

import re

import jax
import numpy as np
import optax
import pytest

from mmjax.config import AudioConfig, GroupedAttentionConfig, ModelConfig, MoeConfig, OptimizerConfig, VisionConfig
from mmjax.models.multimodal import define
from mmjax.planner.parameters import parameter_arrays
from mmjax.presets.kimi_k3 import kimi_k3_tiny
from mmjax.training.optimizer import make_optimizer, matrix_axes

VARIABLES = define(kimi_k3_tiny()).parameters
STACK = "decoder.segments.1.layers.0"  # two layers of linear attention and experts

# Every parameter of one layer of each kind, numbers of layers left out, with the axes of its array as it lies in one
# layer: rows x columns of its matrices, the axes that count matrices, and whether weights decay.
CLASSES = """
decoder.embedding                         adamw, decayed
decoder.head                              adamw, decayed
decoder.norm                              adamw
decoder.output_residual.norm              adamw
decoder.output_residual.query             adamw
decoder.layer.input_norm                  adamw
decoder.layer.mixer.beta                  0 x 1, decayed
decoder.layer.mixer.decay_bias            adamw
decoder.layer.mixer.decay_down            0 x 1, decayed
decoder.layer.mixer.decay_up              0 x 1 2, decayed
decoder.layer.mixer.key                   0 x 2 for each 1, decayed
decoder.layer.mixer.key_convolution       adamw
decoder.layer.mixer.key_up                0 x 2 for each 1, decayed
decoder.layer.mixer.latent_down           0 x 1, decayed
decoder.layer.mixer.latent_norm           adamw
decoder.layer.mixer.log_rate              adamw
decoder.layer.mixer.output                0 1 x 2, decayed
decoder.layer.mixer.output_gate           0 x 1 2, decayed
decoder.layer.mixer.output_norm           adamw
decoder.layer.mixer.query                 0 x 2 for each 1, decayed
decoder.layer.mixer.query_convolution     adamw
decoder.layer.mixer.query_down            0 x 1, decayed
decoder.layer.mixer.query_norm            adamw
decoder.layer.mixer.query_up              0 x 2 for each 1, decayed
decoder.layer.mixer.value                 0 x 2 for each 1, decayed
decoder.layer.mixer.value_convolution     adamw
decoder.layer.mixer.value_up              0 x 2 for each 1, decayed
decoder.layer.mixer_residual.norm         adamw
decoder.layer.mixer_residual.query        adamw
decoder.layer.mlp.down                    0 x 1, decayed
decoder.layer.mlp.down (experts)          1 x 2 for each 0, decayed
decoder.layer.mlp.gate                    0 x 1, decayed
decoder.layer.mlp.gate (experts)          1 x 2 for each 0, decayed
decoder.layer.mlp.latent_down             0 x 1, decayed
decoder.layer.mlp.latent_norm             adamw
decoder.layer.mlp.latent_up               0 x 1, decayed
decoder.layer.mlp.router                  0 x 1, decayed
decoder.layer.mlp.shared.down             0 x 1, decayed
decoder.layer.mlp.shared.gate             0 x 1, decayed
decoder.layer.mlp.shared.up               0 x 1, decayed
decoder.layer.mlp.up                      0 x 1, decayed
decoder.layer.mlp.up (experts)            1 x 2 for each 0, decayed
decoder.layer.mlp_norm                    adamw
decoder.layer.mlp_residual.norm           adamw
decoder.layer.mlp_residual.query          adamw
projector.down                            0 x 1, decayed
projector.norm                            adamw
projector.up                              0 x 1, decayed
vision.final_norm                         adamw
vision.layers.attention_norm              adamw
vision.layers.down                        0 x 1, decayed
vision.layers.mlp_norm                    adamw
vision.layers.output                      0 1 x 2, decayed
vision.layers.query_key_value             0 x 3 for each 1 2, decayed
vision.layers.up                          0 x 1, decayed
vision.patch_embedding                    0 x 1, decayed
vision.position_table                     adamw, decayed
"""


def class_name(path: str) -> str:
    """The parameter's line in CLASSES: without layer numbers; routed experts apart from dense MLPs."""
    experts = " (experts)" if "experts" in VARIABLES[path].get_metadata()["array_axes"] else ""
    return re.sub(r"segments\.\d+\.layers\.\d+", "layer", path) + experts


def class_of(path: str, is_decayed: bool) -> str:
    variable = VARIABLES[path]
    axes, num_axes = matrix_axes(path, variable, OptimizerConfig()), len(variable.get_metadata()["array_axes"])
    text = "adamw"
    if axes is not None:
        num_stacked = variable.get_value().ndim - num_axes
        rows, columns = (tuple(axis - num_stacked for axis in part) for part in axes)
        counted = sorted({*range(num_axes)} - {*rows, *columns})
        text = f"{' '.join(map(str, rows))} x {' '.join(map(str, columns))}"
        text += f" for each {' '.join(map(str, counted))}" if counted else ""
    return text + (", decayed" if is_decayed else "")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_of_kimi_k3_is_in_its_class(name):
    """Weight decay alone moves a parameter whose gradient is zero."""
    config = OptimizerConfig(name=name, warmup_steps=0, muon_steps=1)
    one_of_each = {class_name(path): path for path in VARIABLES}.values()
    variables = {path: VARIABLES[path] for path in one_of_each}
    parameters = {path: np.ones(v.get_value().shape, np.float32) for path, v in variables.items()}
    _, updates = run(config, variables, parameters, [jax.tree.map(np.zeros_like, parameters)])
    is_decayed = {class_name(path): bool(np.any(update)) for path, update in updates.items()}
    found = {class_name(path): class_of(path, is_decayed[class_name(path)]) for path in VARIABLES}
    expected = dict(re.split("  +", line) for line in CLASSES.strip().splitlines())
    assert found == expected


def test_norms_and_biases_are_no_matrices_however_many_axes_they_have():
    grouped = GroupedAttentionConfig(joint_norm=True, projection_bias=True, output_bias=True)
    audio = AudioConfig(num_layers=1)
    model = ModelConfig(full_attention_kind="grouped", grouped_attention=grouped, mlp_bias=True, audio=audio)
    small = {path: v for path, v in define(model).parameters.items() if path.endswith(("norm", "bias", "scale"))}
    assert any(path.endswith("mixer.query_norm") for path in small)
    assert {path for path, variable in small.items() if matrix_axes(path, variable, OptimizerConfig())} == set()
    assert {array.path for array in parameter_arrays(model) if array.is_matrix and array.name.endswith("norm")} == set()


def run(config, variables, parameters, gradients):
    """(parameters, updates) after an update for each of `gradients`, of a run of 6 steps."""
    optimizer = make_optimizer(config, 6, variables)

    @jax.jit
    def update(gradients, state, parameters):
        # As in the training step: optax mixes its counters with floats.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), updates, state

    state, updates = jax.jit(optimizer.init)(parameters), None
    for gradient in gradients:
        parameters, updates, state = update(gradient, state, parameters)
    return jax.device_get((parameters, updates))


# What a matrix is, for each layer of the stack: a head, an expert, or the whole array.
MATRICES = {
    f"{STACK}.mixer.query": "heads",
    f"{STACK}.mlp.gate": "experts",
    f"{STACK}.mlp.down": "experts",
    f"{STACK}.mixer.output": "output",
    f"{STACK}.mixer.output_gate": "whole",
    f"{STACK}.mlp.latent_down": "whole",
}
IS_DECAYED = {
    **dict.fromkeys(MATRICES, True),
    "decoder.embedding": True,
    "decoder.norm": False,
    f"{STACK}.mixer.decay_bias": False,
    f"{STACK}.mixer.key_convolution": False,
}


def newton_schulz(matrix):
    rows, columns = matrix.shape
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return 0.2 * np.sqrt(max(rows, columns)) * x


def orthogonalised(path, momentum, muon_heads):
    result, kind = np.empty_like(momentum), MATRICES[path]
    for layer, one in enumerate(momentum):
        if kind == "heads" and muon_heads == "per_head":
            for head in range(one.shape[1]):
                result[layer, :, head] = newton_schulz(one[:, head])
        elif kind == "experts":
            for expert in range(len(one)):
                result[layer, expert] = newton_schulz(one[expert])
        else:
            matrix = one.reshape(-1, one.shape[-1]) if kind == "output" else one.reshape(len(one), -1)
            result[layer] = newton_schulz(matrix).reshape(one.shape)
    return result


@pytest.mark.parametrize(
    ("name", "muon_heads"), [("adamw", "per_head"), ("muon", "per_head"), ("muon", "whole")], ids=str
)
def test_updates_follow_the_formulas_of_muon_and_adamw(name, muon_heads):
    config = OptimizerConfig(
        name=name, muon_heads=muon_heads, learning_rate=0.02, warmup_steps=2, weight_decay=0.3, max_gradient_norm=40.0
    )
    # Warm-up in 2 updates, the first of which moves already; a cosine to a tenth in the other 4.
    rates = [0.01, 0.02, *(0.002 + 0.018 * (1 + np.cos(np.pi * part / 4)) / 2 for part in (1, 2))]
    variables = {path: VARIABLES[path] for path in IS_DECAYED}
    random = np.random.default_rng(0)
    draw = lambda: {path: random.normal(size=v.get_value().shape) for path, v in variables.items()}  # noqa: E731
    start, gradients = draw(), [jax.tree.map(lambda g, s=s: s * g, draw()) for s in (0.01, 1.0, 0.3, 2.0)]
    with jax.enable_x64(True):
        found, _ = run(config, variables, start, gradients)

    norms = [np.sqrt(sum(np.sum(g**2) for g in gradient.values())) for gradient in gradients]
    assert norms[0] < config.max_gradient_norm < min(norms[1:])
    for path, weight in start.items():
        momentum, square, trace = (np.zeros_like(weight) for _ in range(3))
        for step, rate in enumerate(rates):
            gradient = gradients[step][path] * min(1, config.max_gradient_norm / norms[step])
            momentum = 0.9 * momentum + 0.1 * gradient
            square = 0.95 * square + 0.05 * gradient**2
            trace = 0.95 * trace + gradient
            direction = momentum / (1 - 0.9 ** (step + 1)) / (np.sqrt(square / (1 - 0.95 ** (step + 1))) + 1e-8)
            if name == "muon" and path in MATRICES:
                direction = orthogonalised(path, 0.95 * trace + gradient, muon_heads)
            weight = weight - rate * (direction + (0.3 * weight if IS_DECAYED[path] else 0))
        # The learning rate alone is a float32.
        np.testing.assert_allclose(found[path], weight, rtol=0, atol=1e-9 * np.abs(weight).max(), err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layers_that_are_held_and_never_run_stay_as_they_are(name):
    # Features are taken after two of three layers.
    vision = VisionConfig(kind="clip", num_layers=3, width=8, num_heads=1, head_width=8, feature_depths=(1, 2))
    model = ModelConfig(num_layers=1, full_attention_layers=(0,), moe=MoeConfig(num_dense_layers=1), vision=vision)
    variables = {path: v for path, v in define(model).parameters.items() if path.startswith("vision.")}
    random = np.random.default_rng(0)
    parameters = {path: random.normal(size=v.get_value().shape).astype(np.float32) for path, v in variables.items()}
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=0), 10, variables)
    # As backpropagation gives them: none behind the second layer.
    gradients = {path: np.ones_like(array) for path, array in parameters.items()}
    for path, gradient in gradients.items():
        if path.startswith("vision.layers."):
            gradient[2:] = 0
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradients, parameters)
    for path, update in updates.items():
        if path.startswith("vision.layers."):
            assert np.all(update[2:] == 0) and np.all(np.any(update[:2].reshape(2, -1) != 0, axis=1)), path
