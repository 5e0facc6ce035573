"""Conversations from a JSONL file, read by byte offset: the file is never held in memory.

Accepted records, one a line:

    {"messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}],
     "images": ["cat.png"]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]}

In a string, each `<image>` takes the next entry of `images`. In a list, text is taken literally, and a part of type
"image" names its file under "image" or "path", or takes the next entry. "weight": 0 keeps an answer out of the loss.
"""

import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from mmjax.data.files import open_regular, reason
from mmjax.data.sources.conversation import ROLES, ImageFile, Message, Part, Sample
from mmjax.errors import DataError

MAX_RECORD_BYTES = 16 * 2**20
IMAGE_MARKER = "<image>"
# Content this trainer does not read; to pass over it would train on something else than the record says.
UNREAD_KEYS = ("videos", "audios", "tools")


class ConversationFile:
    """Samples of one JSONL file. `file[i]` reads, checks and returns record i (blank lines are no records)."""

    def __init__(self, path: Path, media_root: Path):
        self._path, self._media_root = path, media_root
        try:
            with open_regular(path) as file:
                self._stamp = _stamp(file)
                starts, lengths, lines, self.digest = _index(file)
        except (OSError, ValueError) as error:
            raise DataError(
                str(path),
                found=f"no readable file ({reason(error) if isinstance(error, OSError) else error})",
                expected="a JSONL of conversations",
                remedy="check the path in data.source or data.eval_source",
            ) from error
        self._starts, self._lengths, self._lines = (np.array(part) for part in (starts, lengths, lines))
        if not starts:
            raise DataError(
                str(path),
                found="no record",
                expected="one conversation a line",
                remedy="check how the file was written",
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        record = _Record(f"{self._path}, line {self._lines[index]}", self._media_root)
        if self._lengths[index] > MAX_RECORD_BYTES:
            record.refuse(
                f"{self._lengths[index]:,} bytes",
                f"at most {MAX_RECORD_BYTES:,} bytes a line",
                "keep images in files of their own, and check for missing line ends",
            )
        with open_regular(self._path) as file:
            if _stamp(file) != self._stamp:
                record.refuse("a file that changed since the run started", "the same bytes", "start the run again")
            file.seek(self._starts[index])
            return record.parse(file.read(self._lengths[index]))


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _index(file: BinaryIO) -> tuple[array, array, array, str]:
    """Byte offset, length and line number of each record, and the SHA-256 of the file."""
    starts, lengths, lines, digest = array("q"), array("q"), array("q"), hashlib.sha256()
    start = position = 0
    line, is_blank = 1, True
    while True:
        piece = file.readline(MAX_RECORD_BYTES + 1)
        digest.update(piece)
        position += len(piece)
        is_blank = is_blank and (not piece or piece.isspace())
        if piece.endswith(b"\n") or not piece:
            if not is_blank:
                starts.append(start)
                lengths.append(position - start)
                lines.append(line)
            start, line, is_blank = position, line + 1, True
        if not piece:
            return starts, lengths, lines, digest.hexdigest()


class _Record:
    """Checks of one line; each refusal names the line."""

    def __init__(self, where: str, media_root: Path):
        self.where, self.media_root = where, media_root

    def refuse(self, found: str, expected: str, remedy: str, where: str = "") -> NoReturn:
        raise DataError(f"{self.where}{where}", found=found, expected=expected, remedy=remedy)

    def parse(self, line: bytes) -> Sample:
        record = self._json(line)
        if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
            self.refuse(
                _shown(record), 'an object with a list "messages"', "write each conversation as one JSON object a line"
            )
        for key in UNREAD_KEYS:
            if record.get(key):
                self.refuse(f'"{key}"', "text and images", f'convert the record, or remove its "{key}"')
        if not record["messages"]:
            self.refuse("an empty conversation", "at least one question and one answer", "remove the record")
        images = record.get("images") or []
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            self.refuse(f'"images" {_shown(images)}', "a list of paths", "write the path of each image, in order")

        rest = iter(images)
        markers = 0
        messages = []
        for number, message in enumerate(record["messages"], 1):
            role, is_supervised, parts = self._message(message, f", message {number}")
            filled = []
            for part in parts:
                if part is None:
                    markers += 1
                    part = ImageFile(where=self.where, root=self.media_root, path=next(rest, ""))
                filled.append(part)
            messages.append(Message(role=role, parts=tuple(filled), is_supervised=is_supervised))
        if markers != len(images):
            self.refuse(
                f"{markers} image markers and {len(images)} images",
                "one image for each marker",
                f'correct "images" or the {IMAGE_MARKER} markers (literal text can be given as a content list)',
            )
        if not any(message.is_supervised for message in messages):
            self.refuse(
                "no supervised token", "at least one answer of the assistant", "add the answer, or remove the record"
            )
        return Sample(where=self.where, messages=tuple(messages))

    def _json(self, line: bytes) -> Any:
        for mark, name in (
            (b"\xef\xbb\xbf", "UTF-8 byte order mark"),
            (b"\xff\xfe", "UTF-16"),
            (b"\xfe\xff", "UTF-16"),
        ):
            if line.startswith(mark):
                self.refuse(f"a {name}", "UTF-8 without a byte order mark", "convert the file: iconv, or `sed 1s/^.//`")
        try:
            # JSON can spell half a surrogate pair, which is no text; encoding finds it.
            return _encodable(json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys))
        except RecursionError:
            self.refuse("brackets nested too deep", "a conversation", "remove the record")
        except UnicodeError as error:
            self.refuse(f"invalid text ({error})", "valid UTF-8", "write the file again as UTF-8")
        except ValueError as error:
            self.refuse(f"broken JSON ({error})", "one JSON object a line", "correct the line; was the file cut off?")

    def _message(self, message: Any, where: str) -> tuple[Any, bool, list[Part | None]]:
        """Role, whether it is supervised, and parts; None is a picture to be taken from "images"."""
        if not isinstance(message, dict):
            self.refuse(_shown(message), 'an object with "role" and "content"', "correct the message", where)
        unknown = sorted(message.keys() - {"role", "content", "name", "weight"})
        if unknown:
            self.refuse(f'unknown "{unknown[0]}"', 'only "role", "content", "name", "weight"', "remove it", where)
        role = message.get("role")
        if role not in ROLES:
            found = f"role {_shown(role)}" if "role" in message else "no role"
            self.refuse(found, f"one of {', '.join(ROLES)}", "correct the role", where)
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            self.refuse(f"weight {_shown(weight)}", "0 or 1", "correct the weight", where)
        return role, role == "assistant" and bool(weight), self._parts(message.get("content"), where)

    def _parts(self, content: Any, where: str) -> list[Part | None]:
        if isinstance(content, str):
            first, *others = content.split(IMAGE_MARKER)
            return [first, *(part for text in others for part in (None, text))]
        if not isinstance(content, list):
            self.refuse(f"content {_shown(content)}", "a string, or a list of parts", "correct the content", where)
        parts: list[Part | None] = []
        for entry in content:
            match entry:
                case {"type": "text", "text": str(text)}:
                    parts.append(text)
                case {"type": "image", "image": str(path)} | {"type": "image", "path": str(path)}:
                    parts.append(ImageFile(where=self.where, root=self.media_root, path=path))
                case {"type": "image"} if len(entry) == 1:
                    parts.append(None)
                case _:
                    self.refuse(
                        f"part {_shown(entry)}",
                        '{"type": "text", "text": ...} or {"type": "image", "image": path}',
                        "correct the part",
                        where,
                    )
        return parts


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate key {name!r}")
        result[name] = value
    return result


def _encodable(value: Any) -> Any:
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
