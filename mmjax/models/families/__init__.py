"""Families of released models, one module each: their config.json and tensors, and our settings and parameters."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from mmjax.config import ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families.released import ReleasedTensor


class Family(Protocol):
    """What the module of a family has."""

    MODEL_TYPES: tuple[str, ...]
    """Values of config.json's `model_type` that it reads."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        """Raises ConfigurationError where a field is missing, not understood, or asks for what is not built."""
        ...

    @staticmethod
    def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
        """Every tensor of a released checkpoint of `model`, as `save_pretrained` or the vendor writes it."""
        ...


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that reads a config.json.

    Raises:
      ConfigurationError: there is none for its `model_type`.
    """
    wanted = config.get("model_type")
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    known: list[str] = []
    # The module of the same name first: others are then not imported. What families share has no MODEL_TYPES.
    for name in sorted(names, key=lambda name: name != wanted):
        family = cast(Family, importlib.import_module(f"{__name__}.{name}"))
        if wanted in (types := getattr(family, "MODEL_TYPES", ())):
            return family
        known += types
    nearest = difflib.get_close_matches(str(wanted), known, n=1)
    raise ConfigurationError(
        "config.json: model_type",
        found=repr(wanted),
        expected=f"one of {', '.join(sorted(known))}",
        remedy=f"did you mean {nearest[0]!r}?" if nearest else "a family is one module in mmjax/models/families",
    )
