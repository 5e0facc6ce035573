"""Records that a run will not use, and sources it has lost: two files of the run, which its next starts read first."""

import dataclasses
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmjax.errors import DataError, writing

QUARANTINE = "quarantine.jsonl"
LOST_SOURCES = "lost_sources.jsonl"


@dataclass(frozen=True, kw_only=True)
class RejectedRecord:
    """One line of the quarantine."""

    source: str
    source_digest: str
    index: int
    """The sample's number in its source."""
    stage: Literal["record", "picture"]
    """`record`: before the run; `picture`: when its pictures were decoded for a batch."""
    where: str
    """File and line."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class LostSourceEvent:
    """A source left out: from a step on its samples leave empty room, from a chapter on its turns go to the others."""

    source: str
    from_step: int
    from_chapter: int


class Quarantine:
    """Both files of one folder; without a folder they are kept in memory."""

    def __init__(self, folder: Path | None = None, *, is_writer: bool = True):
        self._folder, self._is_writer = folder, is_writer
        self._lock = threading.Lock()
        # In order; the values mean nothing.
        self._rejected = dict.fromkeys(RejectedRecord(**entry) for entry in self._read(QUARANTINE))
        self.lost = [LostSourceEvent(**entry) for entry in self._read(LOST_SOURCES)]

    @property
    def rejected(self) -> list[RejectedRecord]:
        """All records, oldest first."""
        return list(self._rejected)

    def reject(self, record: RejectedRecord) -> None:
        """Add a record, unless it is there."""
        with self._lock:
            if record not in self._rejected:
                self._rejected[record] = None
                self._append(QUARANTINE, record)

    def lose(self, event: LostSourceEvent) -> None:
        """Add a lost source."""
        with self._lock:
            self.lost.append(event)
            self._append(LOST_SOURCES, event)

    def _append(self, name: str, entry: RejectedRecord | LostSourceEvent) -> None:
        if self._folder is None or not self._is_writer:
            return
        with writing(self._folder / name):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(entry), ensure_ascii=False) + "\n")

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name if self._folder is not None else None
        if path is None or not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        try:
            # What a kill cut off in mid-line is found out again.
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise DataError(
                str(path),
                found=f"a line that is not JSON ({error})",
                expected="what the run wrote",
                remedy="remove the line, or start a new run_dir",
            ) from error
