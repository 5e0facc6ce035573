"""The source that the settings name."""

from pathlib import Path
from typing import Literal

from mmjax.config import DataConfig
from mmjax.data.sources.conversation import Source
from mmjax.data.sources.digits import Digits
from mmjax.data.sources.jsonl import ConversationFile
from mmjax.errors import ConfigurationError

Split = Literal["train", "held_out"]


def has_held_out(data: DataConfig) -> bool:
    """Whether there is anything to evaluate on."""
    return data.eval_samples > 0 and (bool(data.eval_source) or data.source == "digits")


def open_source(data: DataConfig, seed: int, split: Split) -> Source:
    """Raises DataError where its files cannot be used, ConfigurationError where nothing is held out."""
    if split == "held_out" and not has_held_out(data):
        raise ConfigurationError(
            "data.eval_source",
            found="an empty setting",
            expected="held-out samples",
            remedy="give a JSONL of held-out conversations",
        )
    match data.source if split == "train" else data.eval_source or data.source:
        case "digits":
            return Digits(seed, split)
        case path:
            return ConversationFile(Path(path), Path(data.media_root) if data.media_root else Path(path).parent)
