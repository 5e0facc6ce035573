"""Every setting of a run: frozen dataclasses of plain values. No JAX."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mmjax import axes
from mmjax.config.model_settings import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the six mesh axes, slowest link first. At most one may be -1: all devices that are left."""

    pipe: int = 1
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    device_order: tuple[int, ...] = ()
    """Which device stands at each place of the mesh, the last axis running fastest; empty: in their own order."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in axes.MESH_AXES}

    @property
    def num_devices(self) -> int:
        """Product of the axes; meaningful once no axis is -1."""
        total = 1
        for size in self.sizes.values():
            total *= size
        return total

    @property
    def num_row_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.replica * self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on projections of a frozen model: W + scale * A B."""

    rank: int = 0
    """Width between A and B; 0 trains the model itself."""
    alpha: float = 32.0
    """scale = alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """What gets adapters: `all-linear` (every projection, routed experts too, but no table, head or router); names or
    their last words, released (`q_proj`, `experts.w1`) or ours (`mixer.query`); or regular expressions for whole names.
    """
    exclude: tuple[str, ...] = ()
    """Names in the same forms, left out of what `targets` takes."""
    rank_stabilised: bool = False
    """scale = alpha / sqrt(rank) instead."""
    experts: Literal["per_expert", "shared_down", "none"] = "per_expert"
    """Each routed expert has its own A and B, or its own B behind one A of all experts of a layer, or no adapter."""
    expert_rank: int = 0
    """Of routed experts; 0 takes rank / experts of a token, at least 1. The scale is the same for all."""
    start: str = ""
    """Folder of a `peft` adapter to start from, with the same rank and targets; empty starts from B = 0."""


@dataclass(frozen=True, kw_only=True)
class QuotaConfig:
    """How much of a row and of a batch pictures may take; 1 sets no limit."""

    image_memory: float = 1.0
    """Largest share of patches in what a row holds, in numbers kept for each layer: patches x tower width, tokens x
    model width."""
    image_rows: float = 1.0
    """Share of the rows that may hold pictures; the others are filled with text alone."""
    tolerance: float = 0.05
    """By how much either share may be passed before it counts as a breach. What fits no other way is never left out."""


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """To what length a stream of frames or values is brought."""

    length: int = 64
    """0 leaves every stream as long as it is."""
    longer: Literal["truncate", "mean", "bilinear"] = "mean"
    """A longer one: cut off, averaged over equal windows, or resampled in time."""
    shorter: Literal["keep", "pad", "bilinear"] = "keep"
    """A shorter one: left as it is, padded, or resampled in time, then padded."""
    largest_stretch: float = 2.0
    """`bilinear` makes no stream longer than by this factor."""
    pad_value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they become batches."""

    source: str = "digits"
    """`digits` (scikit-learn's digits in 2x2 grids, with questions), or the path of a .jsonl, .parquet, .tar
    (WebDataset) or .array_record of conversations; or several, `PATH#N,WEIGHT; PATH#N,WEIGHT`: N samples of the file,
    drawn WEIGHT times as often as those of a source of weight 1. Without weights each sample comes once in an epoch."""
    eval_source: str = ""
    """Held-out samples, in the same form; empty takes the held-out part of `digits`, or no evaluation otherwise."""
    media_root: str = ""
    """Folder that image paths are relative to and confined to; empty is the folder of the source's file."""
    tokenizer: str = "bytes"
    """`bytes` or the path of a `tokenizer.json`."""
    image_token: str = "<|media_pad|>"
    """Token of a `tokenizer.json` that stands for one merged image patch; empty for a model that reads text alone."""
    start_token: str = ""
    """Token of a `tokenizer.json` that opens each message before its role, such as <|im_start|>; empty for none."""
    chat_template: str = ""
    """Conversations are written as this chat template says: its file, or a folder of a release that has one, for a
    `tokenizer.json` from the same release. Empty writes them with `start_token`, role and `end_token`."""
    audio_token: str = ""
    """Token of a `tokenizer.json` that stands for one feature of a sound; empty for a model that hears none."""
    newline_token: str = ""
    """Token of a `tokenizer.json` that ends each row of a picture's patches, where the tower wants one (Fuyu)."""
    end_token: str = "<|end_of_msg|>"
    """Token of a `tokenizer.json` that ends an answer."""
    rows: int = 16
    """Rows (packed sequences) of one step, over all devices and micro-batches."""
    row_tokens: int = 256
    row_patches: int = 256
    """Positions, and image patches before the merge, of one row."""
    row_clips: int = 0
    """Clips of sound (`model.audio.clip_frames` each, the last of a sound filled with silence) of one row."""
    image_max_patches: int = 256
    """An image with more patches is scaled down to this many."""
    image_max_pixels: int = 50_000_000
    """An image file that declares more pixels is refused before it is decoded."""
    video: LengthConfig = field(default_factory=lambda: LengthConfig(length=32))
    """Frames of a video (an animated GIF, WebP or PNG); padding is masked, so it never reaches the model."""
    video_frames_per_feature: int = 4
    """Frames that the tower reads together and averages; image_max_patches is shared by them."""
    video_max_frames: int = 4096
    video_max_seconds: float = 600.0
    """A video file with more frames, or of a longer time, is refused before they are decoded."""
    images: Literal["keep", "blank"] = "keep"
    """`blank` replaces every picture by grey: what the text alone can tell."""
    sounds: Literal["keep", "blank"] = "keep"
    """`blank` replaces every sound by silence."""
    sound_max_seconds: float = 600.0
    """A sound file that is longer is refused before it is decoded."""
    signal: LengthConfig = field(default_factory=lambda: LengthConfig(length=0))
    """Values of each channel of a signal; padding is masked, so it never reaches the model."""
    signal_scale: Literal["standard", "keep"] = "standard"
    """`standard` brings each channel of a signal to mean 0 and deviation 1."""
    signal_max_steps: int = 1_000_000
    """A signal with more values of a channel is refused before it is read."""
    too_long: Literal["error", "drop", "drop_image", "truncate"] = "error"
    """A sample that does not fit a row: stop; drop it; leave out its last pictures, as many as needed; or cut its end
    off, a picture or sound in the cut with it. All but the first are counted, and drop what still does not fit."""
    bad_sample: Literal["error", "skip"] = "error"
    """A record that cannot be read: stop, or skip it, count it and write it into the run's quarantine.jsonl."""
    max_bad_samples: int = 100
    max_bad_share: float = 0.001
    """With `skip`: the run stops when more records are bad than both this number and this share of all."""
    lost_source: Literal["stop", "wait", "reweight"] = "stop"
    """A source whose file is gone: stop; wait for it; or go on with the others, their weights in proportion."""
    lost_source_wait_seconds: int = 3600
    """How long `wait` waits before it stops."""
    packing_window: int = 64
    """Samples among which a row is packed; the order of samples is shuffled over the whole source."""
    balance_rows: int = 8
    """Rows of nearly equal cost that stand together: where each device has one row of a batch, how many devices."""
    patch_buckets: int = 1
    """Sizes of a batch's patch arrays: row_patches, half of it, a quarter, ... The smallest that holds a batch is
    taken; each is one more compilation of the step."""
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    prefetch_batches: int = 2
    """Batches made ahead of the step."""
    eval_samples: int = 256


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices with AdamW for the rest; linear warm-up, then cosine."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    final_learning_rate_fraction: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_heads: Literal["per_head", "whole"] = "per_head"
    """Orthogonalise each head's block of a projection, or the projection as one matrix."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every_steps: int = 100
    """0 saves at the end only."""
    keep_last: int = 3
    keep_best: bool = True
    """Also keep the step with the best evaluation."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = 100
    accumulation: int = 1
    """Micro-batches that the rows of a step are split into, one after the other; in a pipeline under way together."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "split_backward"] = "1f1b"
    """Which stage works on which micro-batch when (`python -m mmjax.plan schedule` prints it). `split_backward` fills
    waiting times with gradients of weights, and computes each stage once more for it."""
    pipeline_transfer: Literal["hidden", "direct"] = "hidden"
    """What a stage hands on travels while the next operation is computed, or before it: fewer activations are kept."""
    pipeline_edges: Literal["first_stage", "data_parallel"] = "first_stage"
    """Where tower and embedding run: on the first stage, or on all before the pipeline starts, each with its share of
    the micro-batches. Then no stage waits for the tower, and each keeps the embeddings of the whole step."""
    exchanges_at_once: int = 1
    """How many exchanges between devices XLA may have under way at a time on GPUs: links in a node and between nodes
    work side by side, and more work lies between the start and the end of each."""
    eval_every_steps: int = 100
    """0 evaluates at the end only."""
    weights_in_place: bool = False
    """On GPUs: kernels read a layer's weights where they lie in the stack of all layers, not a copy: less memory and
    time where experts are large. XLA cannot compile every program so."""
    log_every_steps: int = 1
    max_nonfinite_steps: int = 5
    """Steps in a row whose loss or gradient may be non-finite (each is skipped) before the run stops."""
    compilation_cache: str = ""
    """Folder of JAX's persistent compilation cache; empty uses none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `run_dir` holds everything it writes; the same run_dir again resumes."""

    run_dir: str = "runs/default"
    seed: int = 0
    weights: str = ""
    """Folder of a converted checkpoint to start from; empty starts from random numbers."""
    audio_weights: str = ""
    """Folder of a released Whisper whose encoder the audio tower starts from; its projector starts from random numbers.
    The rest of the model comes from `weights`, if given."""
    trained: tuple[str, ...] = ()
    """Parts of the model that are trained, by the first words of their paths (`projector`, `audio_projector`, `vision`,
    `audio`, `decoder`, `decoder.head`, ...), or by words anywhere in them (`*.indexer`); the others keep their numbers.
    Empty trains all."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> MeshConfig:
    """Replace an axis of size -1 by the devices that the other axes leave."""
    open_axes = [name for name, size in mesh.sizes.items() if size == -1]
    if not open_axes:
        return mesh
    others = 1
    for name, size in mesh.sizes.items():
        others *= 1 if name in open_axes else size
    return dataclasses.replace(mesh, **{open_axes[0]: max(1, num_devices // max(1, others))})
