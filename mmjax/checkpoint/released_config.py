"""What a released config.json, tokenizer and template say, checked before anything is built from it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from mmjax.checkpoint.manifest import first_line
from mmjax.checkpoint.strict_json import read_json, what_it_is
from mmjax.config import ConfigurationFaults, ModelConfig, check_model
from mmjax.errors import CheckpointError, ConfigurationError
from mmjax.models.families import Family, family_of

_LARGEST_SIZE = 1 << 40
_MOST_LAYERS = 1000
_LARGEST_TEMPLATE_BYTES = 1 << 20
# Fields of config.json that name a token which stands for a picture, a sound or an edge of one.
PLACEHOLDERS = (
    *("image_token_id", "image_token_index", "media_placeholder_token_id", "video_token_id", "video_token_index"),
    *("vision_start_token_id", "vision_end_token_id", "audio_token_id", "audio_token_index"),
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "video_token", "audio_token")


def read_family(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family of a config.json, and its settings as ours.

    Raises:
      ConfigurationError: a field is missing, not understood, of a wrong kind or size, or asks for what is not built.
    """
    for path, value in _leaves(config, ""):
        if isinstance(value, int) and abs(value) > (_MOST_LAYERS if "layers" in path else _LARGEST_SIZE):
            _refuse(f"config.json: {path}", str(value), "a size that a model can have")
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d+)?", value):
            _refuse(f"config.json: {path}", f"the text {value!r}", "a number without quotes")
    family = family_of(config)
    try:
        # Packing is a matter of the files: see `codecs`.
        model = family.read_config(without_packing(config))
        faults = check_model(model)
    except ConfigurationError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
        # A value of another kind than the field has fails wherever it is first used.
        _refuse("config.json", f"a value of a wrong kind ({first_line(error)})", f"a sound {family.MODEL_TYPES[0]}")
    if faults:
        raise ConfigurationFaults("config.json, as settings of the model", faults)
    return family, model


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif not isinstance(value, list):
        yield path, value


def _refuse(where: str, found: str, expected: str) -> NoReturn:
    raise ConfigurationError(
        where, found=found, expected=expected, remedy="take the config.json that belongs to the weights"
    )


def check_companions(folder: Path, config: Mapping[str, Any], model: ModelConfig) -> None:
    """Check the files that lie beside the weights, in a folder of their own: they must parse and fit the model.

    Raises:
      CheckpointError: one does not.
    """
    settings = {file.name: read_json(file) for file in sorted(folder.glob("*_config.json"))}
    for name in ("special_tokens_map.json", "processor_config.json"):
        if (folder / name).exists():
            settings[name] = read_json(folder / name)
    for file in sorted(folder.glob("*.jinja")):
        _check_template(file)
    if (folder / "tokenizer.json").exists():
        _check_tokenizer(folder / "tokenizer.json", settings, config, model)


def _check_template(file: Path) -> None:
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_file(file, f"byte {error.start} is not UTF-8", "text")
    if len(content) > _LARGEST_TEMPLATE_BYTES or what_it_is(content):
        _refuse_file(file, f"{len(text):,} characters", "a chat template", what_it_is(content))


def _check_tokenizer(
    file: Path, settings: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any], model: ModelConfig
) -> None:
    content = file.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        # The library raises plain Exception for all that is wrong with a file.
        _refuse_file(file, f"{len(content):,} bytes that do not parse ({error})"[:300], "", what_it_is(content))
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder()
    if (largest := max(vocabulary.values(), default=-1)) >= model.vocabulary_size:
        _refuse_file(
            file,
            f"token ids up to {largest}",
            f"ids below {model.vocabulary_size}, the rows of the embedding",
            "take the tokenizer that belongs to the weights",
        )
    for name, values in settings.items():
        for kind in _SPECIAL_TOKENS:
            token = values.get(kind)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str) and token not in vocabulary:
                _refuse_file(
                    file.with_name(name), f"{kind} {token[:80]!r}", "a token of tokenizer.json", "take both anew"
                )
    for name in PLACEHOLDERS:
        number = config.get(name)
        if type(number) is int and number not in added:
            word = tokenizer.id_to_token(number)
            _refuse_file(
                file,
                f"{name} {number}, which is {'no token' if word is None else f'the word {word!r}'}",
                "a token of its own: text would be taken for a picture",
                "take the tokenizer that belongs to the weights",
            )


def _refuse_file(file: Path, found: str, expected: str, remedy: str = "") -> NoReturn:
    raise CheckpointError(
        str(file), found=found, expected=expected or "a usable file", remedy=remedy or "download the file again"
    )


def without_packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for weights that are not packed any more."""
    plain = json.loads(json.dumps(config))
    for holder in (plain, *(part for part in plain.values() if isinstance(part, dict))):
        holder.pop("quantization_config", None)
    return plain
