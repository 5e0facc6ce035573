"""The sources that the settings name."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from mmjax.config import DataConfig
from mmjax.data.files import LostFileError
from mmjax.data.index_cache import IndexCache
from mmjax.data.sources.conversation import Source
from mmjax.data.sources.digits import Digits
from mmjax.data.sources.jsonl import ConversationFile
from mmjax.data.sources.mixture import LostSource, Mixture, SourceName, SubSample, parse_names, patiently
from mmjax.errors import ConfigurationError, DataError

Split = Literal["train", "held_out"]


def has_held_out(data: DataConfig) -> bool:
    """Whether there is anything to evaluate on."""
    return data.eval_samples > 0 and (bool(data.eval_source) or data.source == "digits")


def open_sources(
    data: DataConfig,
    seed: int,
    split: Split,
    cache: IndexCache,
    known: dict[str, LostSource],
    say: Callable[[str], None] = print,
) -> Mixture:
    """All sources of a split. `known` are those of earlier starts, which stand in for files that are gone.

    Raises:
      DataError: a file cannot be used, or is gone and `data.lost_source` does not go on without it.
      ConfigurationError: nothing is held out, or the names make no mixture.
    """
    if split == "held_out" and not has_held_out(data):
        raise ConfigurationError(
            "data.eval_source",
            found="an empty setting",
            expected="held-out samples",
            remedy="give a JSONL of held-out conversations",
        )
    is_eval = split == "held_out" and bool(data.eval_source)
    names = parse_names(data.eval_source if is_eval else data.source, "eval_source" if is_eval else "source")
    waiting = data.lost_source_wait_seconds if data.lost_source == "wait" else 0
    sources: list[Source] = []
    for name in names:
        if name.text in known and not len(known[name.text]):
            # Absent at the first start, and out of the order of samples since.
            sources.append(known[name.text])
            continue

        def opened(name: SourceName = name) -> Source:
            source = _open(name, data, seed, split, cache)
            return source if name.num_samples is None else SubSample(source, name, seed)

        try:
            sources.append(patiently(opened, waiting, say))
        except LostFileError as error:
            if data.lost_source != "reweight" or len(names) == 1:
                raise
            say(f"going on without the source {name.text}: {error.found}")
            sources.append(known.get(name.text, LostSource(name.text, "never seen", 0)))
    if all(isinstance(source, LostSource) for source in sources):
        raise LostFileError(
            "data.source", found="no source left", expected="at least one", remedy="check the paths, or wait for them"
        )
    return Mixture(names, sources)


def _open(name: SourceName, data: DataConfig, seed: int, split: Split, cache: IndexCache) -> Source:
    if name.path == "digits":
        return Digits(seed, split)
    path = Path(name.path)
    media_root = Path(data.media_root) if data.media_root else path.parent
    match path.suffix:
        case ".parquet":
            return _parquet(path, media_root, cache)
        case ".tar":
            from mmjax.data.sources.webdataset import WebDataset

            return WebDataset(path, cache)
        case ".gz" | ".tgz" | ".zst" | ".xz" | ".bz2" | ".zip":
            raise DataError(
                str(path),
                found=f"a compressed file ({path.suffix})",
                expected="a .jsonl, .parquet, .tar or .array_record, which can be read in any order",
                remedy="decompress it first",
            )
        case ".array_record" | ".arrayrecord":
            from mmjax.data.sources.array_records import ArrayRecordFile

            return ArrayRecordFile(path, media_root, cache)
        case _:
            return ConversationFile(path, media_root, cache)


def _parquet(path: Path, media_root: Path, cache: IndexCache) -> Source:
    try:
        from mmjax.data.sources.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            str(path), found="no pyarrow on this machine", expected="it", remedy="pip install -e '.[data]'"
        ) from error
    return ParquetFile(path, media_root, cache)
