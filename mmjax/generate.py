"""`python -m mmjax.generate`: what a model answers, from a run's folder or a converted checkpoint."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mmjax.config import (
    ConfigurationFaults,
    DataConfig,
    Fault,
    MeshConfig,
    RunConfig,
    describe_mesh,
    mesh_split_faults,
    parse_mesh,
    resolve_mesh,
    saved,
)
from mmjax.errors import CheckpointError, ConfigurationError, DataError, MmjaxError

if TYPE_CHECKING:
    from mmjax.data.align import Document
    from mmjax.data.prompts import PromptForm
    from mmjax.models.generation import Generator

# Ctrl-C.
EXIT_STOPPED_AT_ONCE = 130
# Of a released model's pictures: a million pixels at 14 pixels a side.
_RELEASED_MAX_PATCHES = 4096


@dataclass(frozen=True, kw_only=True)
class Command:
    """Continue a prompt, or answer conversations, with a model. Prints text as it comes.

    python -m mmjax.generate runs/digits --prompt "sum?" --image grid.png

    python -m mmjax.generate CONVERTED --style text --prompt "The capital of France is" --max-new-tokens 20
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder of a run (its latest sound checkpoint, adapters included), or of a converted checkpoint."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """One question, or with --style text the beginning of a text."""
    messages: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """A JSONL of conversations, as for training; a last answer of a record is left out, and given anew."""
    image: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH")] = ()
    """A picture in front of the prompt; may be given several times. A converted checkpoint sees at most 4096 patches of
    each, whatever its release allows; larger ones are scaled down."""
    system: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """A system message before the prompt."""
    style: Literal["chat", "text"] = "chat"
    """`chat`: as a conversation, in the form that the model was trained with. `text`: the prompt as it is."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw among so many of the likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws, which depend on nothing else."""
    rows: int = 8
    """Conversations answered side by side."""
    mesh: Annotated[str, tyro.conf.arg(metavar="MESH")] = ""
    """As for training; by default one device, whatever the run was trained on."""
    dtype: Literal["as_saved", "bfloat16", "float32", "float64"] = "as_saved"
    """Hold the weights and compute in this dtype; `as_saved`: in those of the run, or of the converted model."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Speak to the model with the tokenizer.json and chat template of this folder instead of its own."""
    chat_template: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """A chat template in place of the folder's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What a person can mend is one message, never a traceback."""
    try:
        generate(tyro.cli(Command, args=arguments, prog="python -m mmjax.generate"))
        return 0
    except MmjaxError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_STOPPED_AT_ONCE


def generate(command: Command) -> None:
    """Load the model, read the prompts, print the answers."""
    _check(command)
    config = read_settings(command)
    if "float64" in (config.model.parameter_dtype, config.model.compute_dtype):
        import jax

        jax.config.update("jax_enable_x64", True)
    if config.training.compilation_cache:
        import jax

        jax.config.update("jax_compilation_cache_dir", config.training.compilation_cache)
    # All prompts are looked at before anything that takes long.
    form = open_form(command, config)
    documents = read_prompts(command, form)
    _answer(command, config, form, documents, load(command, config, form))


def _check(command: Command) -> None:
    prompts = "it and --messages" if command.prompt else "none"
    faults = [
        Fault(path=option, found=found, remedy=remedy)
        for is_wrong, option, found, remedy in (
            (bool(command.prompt) == bool(command.messages), "--prompt", prompts, "give it or --messages"),
            (command.messages and command.image, "--image", "pictures beside --messages", "name them in its records"),
            (command.messages and command.system, "--system", "beside --messages", "write it in its records"),
            (command.style == "text" and command.messages, "--style", "text with --messages", "give --prompt"),
            (command.style == "text" and command.image, "--style", "text with pictures", "use --style chat"),
            (command.style == "text" and command.system, "--style", "text with --system", "use --style chat"),
            (command.max_new_tokens < 1, "--max-new-tokens", str(command.max_new_tokens), "give at least 1"),
            (command.rows < 1, "--rows", str(command.rows), "give at least 1"),
            (not 0 <= command.temperature < float("inf"), "--temperature", str(command.temperature), "give 0 or more"),
            (command.top_k < 0, "--top-k", str(command.top_k), "give 0 or more"),
            (not 0 < command.top_p <= 1, "--top-p", str(command.top_p), "give more than 0, and at most 1"),
            (not 0 <= command.seed < 2**32, "--seed", str(command.seed), "give 0 to 2^32 - 1"),
        )
        if is_wrong
    ]  # fmt: skip
    if faults:
        raise ConfigurationFaults("command line", faults)


def read_settings(command: Command) -> RunConfig:
    """What the checkpoint was made with (a run's settings, or a converted model), on the mesh that is asked for."""
    from mmjax.models.generation import for_generation

    folder = Path(command.checkpoint)
    if (folder / saved.FILE_NAME).is_file():
        config = saved.load(folder / saved.FILE_NAME)
    elif (folder / "model.yaml").is_file():
        from mmjax.checkpoint.weights import read_model

        data = DataConfig(image_max_patches=_RELEASED_MAX_PATCHES)
        config = RunConfig(weights=str(folder), model=read_model(folder), data=data)
    else:
        raise CheckpointError(
            str(folder),
            found="no folder" if not folder.is_dir() else f"neither {saved.FILE_NAME} nor model.yaml",
            expected="the folder of a run, or of a converted checkpoint",
            remedy="check the path; released weights are made one with `python -m mmjax.convert SRC DST`",
        )
    model = for_generation(config.model)
    if command.dtype != "as_saved":
        model = dataclasses.replace(model, parameter_dtype=command.dtype, compute_dtype=command.dtype)
    config = dataclasses.replace(config, model=model, mesh=_mesh(command))
    # Rows are filled up to what the mesh divides.
    shards = config.mesh.num_row_shards
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, rows=-(-command.rows // shards) * shards)
    )
    training = dataclasses.replace(config.training, accumulation=1)
    if faults := list(mesh_split_faults(dataclasses.replace(config, training=training))):
        raise ConfigurationFaults("--mesh", faults)
    return config


def _mesh(command: Command) -> MeshConfig:
    if not command.mesh:
        return MeshConfig()
    import jax

    mesh = resolve_mesh(parse_mesh(command.mesh), jax.device_count())
    if mesh.pipe > 1 or mesh.context > 1:
        raise ConfigurationError(
            "--mesh",
            found=describe_mesh(mesh),
            expected="pipe=1 and context=1: tokens of an answer come one by one",
            remedy="put the devices on tensor, expert, fsdp or replica",
        )
    if mesh.num_devices > jax.device_count():
        raise ConfigurationError(
            "--mesh",
            found=f"{describe_mesh(mesh)}, which needs {mesh.num_devices} devices; {jax.device_count()} are there",
            expected="a mesh of the devices there are",
            remedy="give a smaller one",
        )
    return mesh


def open_form(command: Command, config: RunConfig) -> "PromptForm":
    """How the model is spoken to: as its run did, or as its release says."""
    from mmjax.data.chat_template import read_template_file
    from mmjax.data.prompts import ReleasedForm, TrainingForm, trained_form
    from mmjax.data.tokenizer import open_tokenizer

    folder = Path(command.checkpoint)
    is_run = (folder / saved.FILE_NAME).is_file()
    if command.chat_template and is_run and not command.tokenizer:
        raise ConfigurationError(
            "--chat-template",
            found="a chat template for the tokenizer of a run, which has none",
            expected="a released tokenizer",
            remedy="give --tokenizer FOLDER too, or leave it out",
        )
    if is_run and not command.tokenizer:
        data, model = config.data, config.model
        form = trained_form(data, model.vision) or TrainingForm(open_tokenizer(data), data, model.vision, model.audio)
    else:
        from mmjax.checkpoint.weights import RELEASED

        files = Path(command.tokenizer) if command.tokenizer else folder / RELEASED
        template = read_template_file(Path(command.chat_template), files) if command.chat_template else None
        form = ReleasedForm(files, config.data, config.model.vision, template)
    if form.vocabulary_size > config.model.vocabulary_size:
        raise DataError(
            command.tokenizer or command.checkpoint,
            found=f"a tokenizer of {form.vocabulary_size} tokens",
            expected=f"at most {config.model.vocabulary_size}, the rows of the model's embedding",
            remedy="use the tokenizer that the model was trained with",
        )
    return form


def read_prompts(command: Command, form: "PromptForm") -> "list[Document]":
    """The prompts that the command line names, as tokens."""
    from mmjax.data.prompts import read_conversations
    from mmjax.data.sources.conversation import ImageFile, Message, Sample

    if command.style == "text":
        return [form.text(command.prompt)]
    if command.messages:
        return form.chats(read_conversations(Path(command.messages)))
    pictures = tuple(ImageFile(where="--image", root=Path(path).parent, path=Path(path).name) for path in command.image)
    asked = [Message(role="user", parts=(*pictures, command.prompt), is_supervised=False)]
    if command.system:
        asked.insert(0, Message(role="system", parts=(command.system,), is_supervised=False))
    return form.chats([Sample(where="--prompt", messages=tuple(asked))])


def load(command: Command, config: RunConfig, form: "PromptForm") -> "Generator":
    """The model on its mesh, with the weights of the checkpoint."""
    from mmjax.checkpoint.adapters import define_run
    from mmjax.models.generation import Generator
    from mmjax.parallel.mesh import make_mesh
    from mmjax.training.step import abstract_state, base_arrays

    mesh = make_mesh(config.mesh)
    abstract = abstract_state(config, mesh)
    folder = Path(command.checkpoint)
    if (folder / saved.FILE_NAME).is_file():
        arrays = _run_arrays(folder, config, abstract)
    else:
        base = base_arrays(config, abstract)
        parameters, router_biases, frozen = (
            {path: base[path] for path in group}
            for group in (abstract.parameters, abstract.router_biases, abstract.frozen)
        )
        arrays = (parameters, router_biases, frozen)
    return Generator(define_run(config), arrays, mesh, form.vocabulary_size)


def _run_arrays(folder: Path, config: RunConfig, abstract: Any) -> tuple[dict, dict, dict]:
    """Of a run's newest sound checkpoint; under adapters the model itself comes from where the run had it."""
    from mmjax.checkpoint.adapters import check_base
    from mmjax.checkpoint.manifest import Damage, read_manifest
    from mmjax.checkpoint.store import Store
    from mmjax.checkpoint.weights import load_step
    from mmjax.models.layout import Relayout, without_pipeline
    from mmjax.training.loop import CHECKPOINTS
    from mmjax.training.step import saved_part, with_base

    checkpoints = Store(folder / CHECKPOINTS, read_only=True)
    trained = saved.load(folder / saved.FILE_NAME).model
    relayout = Relayout(trained, config.model) if trained != without_pipeline(trained) else None
    part = saved_part(config, abstract)
    wanted = {
        f"{group}.{path}": leaf
        for group in ("parameters", "router_biases", "frozen")
        for path, leaf in getattr(part, group).items()
    }
    for step in reversed(checkpoints.steps()):
        path = checkpoints.directory / str(step)
        try:
            found = load_step(path, wanted, relayout)
            metadata = read_manifest(path)["metadata"]
        except Damage as damage:
            print(f"checkpoint {path}: damaged: {damage}; looking at the step before", file=sys.stderr)
            continue
        if config.lora.rank:
            check_base(config, metadata["base"])
        groups = {
            group: {path: found[f"{group}.{path}"] for path in getattr(part, group)}
            for group in ("parameters", "router_biases", "frozen")
        }
        state = with_base(config, abstract, dataclasses.replace(part, **groups))
        print(f"step {step} of {folder}", file=sys.stderr)
        return state.parameters, state.router_biases, state.frozen
    raise CheckpointError(
        str(checkpoints.directory),
        found="no sound checkpoint",
        expected="at least one complete step",
        remedy="let the run save one: it does so at its end, and every checkpoint.every_steps steps",
    )


class _Answers:
    """Answers as they grow, printed in order: one alone as it comes, several when each is finished."""

    def __init__(self, form: "PromptForm", documents: "Sequence[Document]"):
        self._form, self._documents = form, documents
        self._is_alone = len(documents) == 1
        self._ids: list[list[int]] = [[] for _ in documents]
        self._has_ended = [False] * len(documents)
        self._num_printed = 0
        self._shown = ""

    def add(self, number: int, token: int) -> None:
        """One token of answer `number`; a stop token ends it."""
        if token in self._form.stop_tokens:
            self._has_ended[number] = True
        else:
            self._ids[number].append(token)
        if self._is_alone:
            text = self._form.decode(self._ids[0])
            # The bytes of a character may come in several tokens.
            if not text.endswith("\ufffd") or self._has_ended[0]:
                self._show(text)

    def end(self, numbers: Sequence[int]) -> None:
        """No more tokens come for these."""
        for number in numbers:
            self._has_ended[number] = True
        self.flush()

    def flush(self) -> None:
        """Print what is finished, as far as all before it is."""
        while self._num_printed < len(self._ids) and self._has_ended[self._num_printed]:
            number = self._num_printed
            self._num_printed += 1
            if not self._is_alone:
                print(f"--- {self._documents[number].where}")
            self._show(self._form.decode(self._ids[number]))
            self._shown = ""
            print(flush=True)

    def _show(self, text: str) -> None:
        # What was printed stays; a decoder that takes back what it said (none known) would go on behind it.
        print(text[len(self._shown) :], end="", flush=True)
        self._shown = text


def _answer(
    command: Command, config: RunConfig, form: "PromptForm", documents: "list[Document]", generator: "Generator"
) -> None:
    """Generate and print all answers, then how fast it was."""
    from mmjax.data.prompts import bucket, prompt_batch
    from mmjax.models.generation import NO_TOKEN, Sampling

    sampling = Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p, seed=command.seed)
    lengths = [len(document.tokens) for document in documents]
    capacity = bucket(max(lengths)) + bucket(command.max_new_tokens)
    shards, vision = config.mesh.num_row_shards, config.model.vision
    rows = min(config.data.rows, -(-len(documents) // shards) * shards)
    answers = _Answers(form, documents)
    reading_seconds = writing_seconds = 0.0
    num_written = 0
    for first in range(0, len(documents), rows):
        numbers = range(first, min(first + rows, len(documents)))
        chosen = [documents[number] for number in numbers]
        batch = prompt_batch(chosen, rows, config.data, vision, form.pad_token_id, config.model.audio)
        clock, is_first = time.perf_counter(), True
        for step in generator.stream(
            batch,
            max_new_tokens=command.max_new_tokens,
            capacity=capacity,
            stop_tokens=form.stop_tokens,
            sampling=sampling,
            prompt_numbers=range(first, first + rows),
        ):
            now = time.perf_counter()
            live = [
                (number, token)
                for number, token in zip(numbers, step.tokens.tolist(), strict=False)
                if token != NO_TOKEN
            ]
            # The first token takes reading the prompts, and compiling both programs.
            if is_first:
                reading_seconds += now - clock
            else:
                writing_seconds, num_written = writing_seconds + now - clock, num_written + len(live)
            clock, is_first = now, False
            for number, token in live:
                answers.add(number, token)
            answers.flush()
        answers.end(numbers)
    speed = f", then {num_written / writing_seconds:,.1f} tokens a second" if num_written else ""
    print(
        f"{sum(lengths):,} tokens of {len(documents)} prompts read in {reading_seconds:.1f} s with compiling{speed}",
        file=sys.stderr,
    )


def _print_error(error: MmjaxError) -> None:
    if isinstance(error, ConfigurationFaults):
        print(f"error: {error.where}", file=sys.stderr)
        for fault in error.faults:
            print(f"  {fault.path}: {fault.found}; {fault.remedy}", file=sys.stderr)
        return
    print(error.lines(), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
