"""One record as a conversation, whatever file it came in. Three forms are read:

    {"messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}],
     "images": ["cat.png"]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]}
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}],
     "image": "cat.png"}

In a string, each `<image>` takes the next entry of `images` (a list) or `image` (one, or a list). In a list of parts,
text is taken literally; a picture is {"type": "image"} with its path under "image" or "path", or taking the next
entry, or OpenAI's {"type": "image_url", "image_url": {"url": path}}. Videos are named in the same ways: `<video>`,
`videos` or `video`, parts of type "video"; sounds: `<audio>`, `audios` or `audio`, parts of type "audio"; and raw
signals: `<signal>`, `signals` or `signal`, parts of type "signal". In a record without videos `<video>` is text, and so
are `<audio>` and `<signal>` in one without sounds and signals. "weight": 0 or "loss": false keeps an answer out of the
loss. "system" beside "conversations" is a system message, "kind" a text by which evaluation groups its questions.
"""

import enum
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mmjax.data.sources.conversation import (
    ROLES,
    ImageFile,
    MediumKind,
    Message,
    Part,
    Picture,
    Role,
    Sample,
    Sound,
    SoundFile,
    VideoFile,
)
from mmjax.errors import DataError

MAX_RECORD_BYTES = 16 * 2**20
# Content this trainer does not read; to pass over it would train on something else than the record says.
UNREAD_KEYS = ("tools",)
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
MESSAGE_KEYS = {"role", "content", "name", "weight", "loss"}


class Marker(enum.Enum):
    """Stands in a message for the next entry of the record's images, videos, sounds or signals."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    SIGNAL = "signal"


def decode_record(line: bytes, where: str) -> Any:
    """The JSON value of one record.

    Raises:
      DataError: not UTF-8, not JSON, a key given twice, or text that is no text.
    """
    for mark, name in (
        (b"\xef\xbb\xbf", "UTF-8 byte order mark"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ):
        if line.startswith(mark):
            _refuse(where, f"a {name}", "UTF-8 without a byte order mark", "convert the file: iconv, or `sed 1s/^.//`")
    try:
        return _encodable(json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys))
    except RecursionError:
        _refuse(where, "brackets nested too deep", "a conversation", "remove the record")
    except UnicodeError as error:
        _refuse(where, f"invalid text ({error})", "valid UTF-8", "write the file again as UTF-8")
    except ValueError as error:
        _refuse(where, f"broken JSON ({error})", "one JSON object a record", "correct it; was the file cut off?")


class RecordReader:
    """Checks of one record; each refusal names the record."""

    def __init__(
        self,
        where: str,
        picture: Callable[[Any], Picture],
        entry_kinds: tuple[type, ...] = (str,),
        video: Callable[[str], VideoFile] | None = None,
        sound: Callable[[Any, MediumKind], Sound] | None = None,
    ):
        """`picture` makes a picture of an entry of "images", which is of `entry_kinds`, or of a path in a message.

        `sound` makes a sound or signal in the same way, `video` a video of a path; without them such media are refused.
        """
        self.where, self._picture, self._entry_kinds = where, picture, entry_kinds
        self._from_path: dict[Marker, Callable[[Any], Part] | None] = {
            Marker.VIDEO: video,
            Marker.AUDIO: sound and (lambda entry: sound(entry, "sound")),
            Marker.SIGNAL: sound and (lambda entry: sound(entry, "signal")),
        }
        self._markers: tuple[Marker, ...] = (Marker.IMAGE,)

    def refuse(self, found: str, expected: str, remedy: str, where: str = "") -> NoReturn:
        _refuse(f"{self.where}{where}", found, expected, remedy)

    def read(self, record: Any, *, needs_answer: bool = True) -> Sample:
        """The conversation of a decoded record; pictures are named, not opened.

        Without `needs_answer` it may end with a question that nobody has answered yet.
        """
        turns = self._turns(record)
        refused = [marker.value for marker, make in self._from_path.items() if make is None]
        for key in (*UNREAD_KEYS, *(f"{kind}{plural}" for kind in refused for plural in ("s", ""))):
            if record.get(key):
                self.refuse(f'"{key}"', "text and images", f'convert the record, or remove its "{key}"')
        if not turns:
            self.refuse("an empty conversation", "at least one question and one answer", "remove the record")
        kinds = {marker: (str,) if marker is Marker.VIDEO else self._entry_kinds for marker in Marker}
        entries = {marker: self._entries(record, marker.value, kinds[marker]) for marker in Marker}
        self._markers = tuple(marker for marker in Marker if marker is Marker.IMAGE or entries[marker])
        rest = {marker: iter(of_kind) for marker, of_kind in entries.items()}
        counts = dict.fromkeys(Marker, 0)
        messages = []
        for number, turn in enumerate(turns, 1):
            role, is_supervised, parts = self._message(turn, f", message {number}")
            filled: list[Part] = []
            for part in parts:
                if isinstance(part, Marker):
                    counts[part] += 1
                    # Too few are counted below, with both numbers.
                    entry = next(rest[part], None)
                    filled += [self._medium(part, entry)] if entry is not None else []
                else:
                    filled.append(part)
            messages.append(Message(role=role, parts=tuple(filled), is_supervised=is_supervised))
        for marker, of_kind in entries.items():
            kind = marker.value
            if counts[marker] != len(of_kind):
                self.refuse(
                    f"{counts[marker]} {kind} markers and {len(of_kind)} {kind}s",
                    f"one {kind} for each marker",
                    f'correct "{kind}s" or the <{kind}> markers (literal text can be given as a content list)',
                )
        if needs_answer and not any(message.is_supervised for message in messages):
            self.refuse(
                "no supervised token", "at least one answer of the assistant", "add the answer, or remove the record"
            )
        kind = record.get("kind")
        return Sample(where=self.where, messages=tuple(messages), kind=kind if isinstance(kind, str) else "")

    def _turns(self, record: Any) -> list[Any]:
        """Messages with "role" and "content"."""
        if isinstance(record, dict) and isinstance(record.get("messages"), list):
            return record["messages"]
        if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
            self.refuse(
                shown(record),
                'an object with a list "messages" or "conversations"',
                "write each conversation as one JSON object",
            )
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        return system + [
            self._from_sharegpt(turn, f", message {number}") for number, turn in enumerate(record["conversations"], 1)
        ]

    def _from_sharegpt(self, turn: Any, where: str) -> dict[str, Any]:
        if not isinstance(turn, dict):
            self.refuse(shown(turn), 'an object with "from" and "value"', "correct the message", where)
        unknown = sorted(turn.keys() - {"from", "value", "weight", "loss"})
        if unknown:
            self.refuse(f'unknown "{unknown[0]}"', 'only "from", "value", "weight", "loss"', "remove it", where)
        sender = turn.get("from")
        if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
            found = f'"from" {shown(sender)}'
            self.refuse(found, f"one of {', '.join(SHAREGPT_ROLES)}", "correct the sender", where)
        switches = {name: turn[name] for name in ("weight", "loss") if name in turn}
        return {"role": SHAREGPT_ROLES[sender], "content": turn.get("value"), **switches}

    def _entries(self, record: dict[str, Any], kind: str, kinds: tuple[type, ...]) -> list[Any]:
        if record.get(kind) is not None and record.get(f"{kind}s"):
            self.refuse(f'both "{kind}" and "{kind}s"', "one of them", "keep one")
        entries = record.get(f"{kind}s") or record.get(kind) or []
        entries = entries if isinstance(entries, list) else [entries]
        if not all(isinstance(entry, kinds) for entry in entries):
            self.refuse(f'"{kind}s" {shown(entries)}', "a list of paths", f"write the path of each {kind}, in order")
        return entries

    def _medium(self, marker: Marker, entry: Any) -> Part:
        if marker is Marker.IMAGE:
            return self._picture(entry)
        make = self._from_path[marker]
        if make is None:
            self.refuse(f"{marker.value} {shown(entry)}", "text and images", "remove it")
        return make(entry)

    def _message(self, message: Any, where: str) -> tuple[Role, bool, list[Part | Marker]]:
        """Role, whether it is supervised, and parts, some still to be taken from the record's media."""
        if not isinstance(message, dict):
            self.refuse(shown(message), 'an object with "role" and "content"', "correct the message", where)
        # A table has all its columns in each row: an empty one says nothing.
        unknown = sorted(name for name in message.keys() - MESSAGE_KEYS if message[name] is not None)
        if unknown:
            self.refuse(
                f'unknown "{unknown[0]}"', 'only "role", "content", "name", "weight", "loss"', "remove it", where
            )
        role = message.get("role")
        if role not in ROLES:
            found = f"role {shown(role)}" if "role" in message else "no role"
            self.refuse(found, f"one of {', '.join(ROLES)}", "correct the role", where)
        is_learned = True
        for name in ("weight", "loss"):
            value = message.get(name)
            if value is not None:
                if value not in (0, 1):
                    self.refuse(f"{name} {shown(value)}", "0 or 1", f"correct the {name}", where)
                is_learned = is_learned and bool(value)
        return role, role == "assistant" and is_learned, self._parts(message.get("content"), where)

    def _parts(self, content: Any, where: str) -> list[Part | Marker]:
        if isinstance(content, str):
            names = "|".join(marker.value for marker in self._markers)
            pieces = re.split(f"<({names})>", content)
            return [Marker(piece) if number % 2 else piece for number, piece in enumerate(pieces)]
        if not isinstance(content, list):
            self.refuse(f"content {shown(content)}", "a string, or a list of parts", "correct the content", where)
        return [self._part(entry, where) for entry in content]

    def _part(self, entry: Any, where: str) -> Part | Marker:
        if isinstance(entry, dict):
            entry = {name: value for name, value in entry.items() if value is not None}
        match entry:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": "image", "image": str(path)} | {"type": "image", "path": str(path)}:
                return self._picture(path)
            case {"type": "image_url", "image_url": {"url": str(path)}} | {"type": "image_url", "image_url": str(path)}:
                return self._picture(path)
            case {"type": "image"} if len(entry) == 1:
                return Marker.IMAGE
            case {"type": "video" | "audio" | "signal" as kind} if len(entry) == 1 and Marker(kind) in self._markers:
                return Marker(kind)
            case {"type": "video" | "audio" | "signal" as kind, **rest} if make := self._from_path[Marker(kind)]:
                if len(rest) == 1 and isinstance(path := rest.get(kind, rest.get("path")), str):
                    return make(path)
        raise DataError(
            f"{self.where}{where}",
            found=f"part {shown(entry)}",
            expected='{"type": "text", "text": ...} or {"type": "image", "image": path}',
            remedy="correct the part",
        )


def file_reader(where: str, media_root: Path) -> RecordReader:
    """A reader of records whose media are files in a folder."""
    return RecordReader(
        where,
        lambda path: ImageFile(where=where, root=media_root, path=path),
        video=lambda path: VideoFile(where=where, root=media_root, path=path),
        sound=lambda path, kind: SoundFile(where=where, root=media_root, path=path, kind=kind),
    )


def _refuse(where: str, found: str, expected: str, remedy: str) -> NoReturn:
    raise DataError(where, found=found, expected=expected, remedy=remedy)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate key {name!r}")
        result[name] = value
    return result


def _encodable(value: Any) -> Any:
    # JSON can spell half a surrogate pair, which is no text; encoding finds it.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def shown(value: Any) -> str:
    """A value of a record, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
