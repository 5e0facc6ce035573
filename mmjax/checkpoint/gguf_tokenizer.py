"""The tokenizer inside a GGUF file, as the files that transformers reads: tokenizer.json and what goes with it."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from mmjax.errors import CheckpointError

# Values of `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE = "▁"


def tokenizer_files(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The files by name with their text, and what a person should know of them.

    Raises:
      CheckpointError: the tokenizer in the file contradicts itself.
    """
    files = {
        "generation_config.json": _text({f"{n}_token_id": config.get(f"{n}_token_id") for n in ("bos", "eos")}),
    }
    template, license_name = metadata.get("tokenizer.chat_template"), metadata.get("general.license")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    if isinstance(license_name, str):
        files["LICENSE.txt"] = f"{license_name}, as the GGUF file says.\n"
    kind, rules = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if kind is None:
        return files, ["the GGUF file holds no tokenizer"]
    splitting = _splitting(rules) if kind == "gpt2" else None
    if kind != "llama" and splitting is None:
        return files, [f"its tokenizer ({kind}, {rules}) is not known: add the tokenizer.json of this model yourself"]
    try:
        tokenizer = _sentence_pieces(metadata) if splitting is None else _byte_pairs(metadata, splitting)
        special = _mark_tokens(tokenizer, metadata)
    except Exception as error:
        # The tokenizers library raises plain Exception for all that is wrong.
        raise CheckpointError(
            "tokenizer of the GGUF file",
            found=f"{type(error).__name__}: {error}"[:200],
            expected="tokens, types and merges that belong together",
            remedy="take a sound GGUF",
        ) from error
    settings: dict[str, Any] = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    if "chat_template.jinja" in files:
        settings["chat_template"] = template
    files |= {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": _text(settings)}
    return files, []


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in values.items() if value is not None}, indent=2) + "\n"


def _splitting(rules: str) -> Any:
    """How text is cut before pairs are merged, by llama.cpp's name of it; None if that is not known."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rules in ("gpt-2", "gpt2"):
        return byte_level
    if rules == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}.get(rules)
    if pattern is None:
        return None
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_pairs(metadata: Mapping[str, Any], splitting: Any) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    rules = metadata.get("tokenizer.ggml.pre")
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=rules in ("llama-bpe", "llama3")))
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentence_pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary, scores = _vocabulary(metadata), metadata["tokenizer.ggml.scores"]
    ranked = []
    for token, score in zip(vocabulary, scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right, score) for left, right in halves if left in vocabulary and right in vocabulary]
        ranked += sorted(known, key=lambda merge: (vocabulary[merge[0]], vocabulary[merge[1]]))
    ranked.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [(left, right) for left, right, _ in ranked]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_space = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_space]) if has_prefix else to_space
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens stand twice in it")
    return vocabulary


def _mark_tokens(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Tell the tokenizer which tokens are control tokens; returns those with a part to play, by name."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    parts = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {}
    for name, short in parts.items():
        if (number := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            if not 0 <= number < len(tokens):
                raise ValueError(f"{name}_token_id {number} of {len(tokens)} tokens")
            special[f"{short}_token"] = tokens[number]
    if metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"):
        first = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, metadata["tokenizer.ggml.bos_token_id"])],
        )
    return special
