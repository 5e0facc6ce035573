"""Reading a released `config.json`: each field is taken, checked or left out on purpose; none is dropped unseen."""

import difflib
from collections.abc import Mapping
from typing import Any

from mmjax.errors import ConfigurationError

_MISSING = object()
# Fields that say nothing about the numbers a model computes.
_WITHOUT_EFFECT = frozenset(
    (
        *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype"),
        *("chunk_size_feed_forward", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder"),
        *("label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "return_dict"),
        *("problem_type", "torch_dtype", "transformers_version", "use_cache", "tokenizer_class"),
    )
)
# What older versions of transformers write into every config.json. As it stands here it says nothing.
_BOILERPLATE: dict[str, Any] = {
    **dict.fromkeys(("add_cross_attention", "is_decoder", "tie_encoder_decoder"), False),
    **dict.fromkeys(("torchscript", "use_bfloat16", "tf_legacy_loss"), False),
    **dict.fromkeys(("cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task", "prefix"), None),
    **dict.fromkeys(("sep_token_id", "task_specific_params"), None),
    "pruned_heads": {},
    # Of generation, which generation_config.json speaks of.
    **dict.fromkeys(("do_sample", "early_stopping", "output_scores", "remove_invalid_values"), False),
    "return_dict_in_generate": False,
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"), None),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("temperature", "top_p", "typical_p", "length_penalty", "repetition_penalty"), 1.0),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "min_length", "no_repeat_ngram_size"), 0),
    "max_length": 20,
    "top_k": 50,
}


class Fields:
    """The fields of one object of a `config.json`, each to be used once.

    fields = Fields(config)
    width = fields.take("hidden_size")
    fields.expect("attention_bias", False)
    fields.finish()
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json"):
        self._config, self._where = config, where
        self._seen: set[str] = set()

    def take(self, *names: str, default: Any = _MISSING) -> Any:
        """The value of the first of `names` that is there; of none, `default`.

        Raises:
          ConfigurationError: none is there and there is no default.
        """
        self._seen.update(names)
        for name in names:
            if name in self._config:
                return self._config[name]
        if default is _MISSING:
            raise ConfigurationError(
                f"{self._where}: {names[0]}",
                found="no such field",
                expected="the field" + (f" (or {', '.join(names[1:])})" if len(names) > 1 else ""),
                remedy="take the config.json that belongs to the weights",
            )
        return default

    def part(self, name: str) -> "Fields":
        """The object under `name` as fields of its own; empty if it is absent or null."""
        return Fields(self.take(name, default=None) or {}, f"{self._where}: {name}")

    def expect(self, name: str, *values: Any) -> None:
        """`name` is absent or one of `values`: what the blocks of a family can do.

        Raises:
          ConfigurationError: it is something else.
        """
        found = self.take(name, default=values[0])
        if found not in values:
            raise ConfigurationError(
                f"{self._where}: {name}",
                found=repr(found),
                expected=" or ".join(map(repr, values)),
                remedy="this model needs something that is not built",
            )

    def ignore(self, *names: str) -> None:
        """Fields without effect on what this family computes."""
        self._seen.update(names)

    def finish(self) -> None:
        """Raises ConfigurationError if a field was neither used nor known to be without effect."""
        said = {name for name, value in _BOILERPLATE.items() if self._config.get(name, value) == value}
        if unknown := sorted(self._config.keys() - self._seen - _WITHOUT_EFFECT - said):
            nearest = (difflib.get_close_matches(name, self._seen, n=1) for name in unknown)
            named = [f"{name} (like {near[0]})" if near else name for name, near in zip(unknown, nearest, strict=True)]
            raise ConfigurationError(
                self._where,
                found=f"fields that are not understood: {', '.join(named)}",
                expected="only fields whose meaning is known: a dropped one would change the numbers",
                remedy="update mmjax, or remove a field that you know to be without effect",
            )
