"""Text to tokens: bytes, or a `tokenizer.json`. Control tokens come from the markup alone, never from text.

A message is written as

    header(role)  content  end token

where the header is one token of the bytes tokenizer, and the role's name and a line break ("user\\n") with a
`tokenizer.json`: a header stands only after an end token, so the same words inside a message are nothing but words.
With `data.start_token` this token stands before the role, and a line break between messages: ChatML, if the tokens are
"<|im_start|>" and "<|im_end|>". Where the tokenizer_config.json beside the file says `add_bos_token`, its `bos_token`
opens each conversation.
A picture is one image token for each merged patch, a sound one audio token for each of its features.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from mmjax.config import DataConfig
from mmjax.data.chat_template import read_object, special_tokens
from mmjax.data.files import open_regular, reason
from mmjax.data.sources.conversation import ROLES, Role
from mmjax.errors import DataError


class Tokenizer(Protocol):
    """Both tokenizers."""

    vocabulary_size: int
    """One more than the largest id."""
    pad_token_id: int
    """Fills unused positions; which positions are unused is told by segment ids, never by this id."""
    image_token_id: int
    newline_token_id: int | None
    """Ends each row of a picture's patches, for towers that want one."""
    audio_token_id: int
    end_token_id: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text; whatever it spells, none of them is a control token."""
        ...

    def header(self, role: Role, *, is_first: bool = True) -> list[int]:
        """Ids that open a message, the first of a conversation or a later one."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, control tokens left out."""
        ...


def open_tokenizer(data: DataConfig) -> Tokenizer:
    """Raises DataError where the file cannot be used."""
    match data.tokenizer:
        case "bytes":
            return ByteTokenizer()
        case path:
            return FileTokenizer(
                Path(path),
                image_token=data.image_token,
                end_token=data.end_token,
                newline_token=data.newline_token,
                start_token=data.start_token,
                audio_token=data.audio_token,
            )


class ByteTokenizer:
    """The 256 bytes of UTF-8, then pad, the roles, image, end of message, audio."""

    pad_token_id = 256
    image_token_id = 260
    newline_token_id: int | None = ord("\n")
    end_token_id = 261
    audio_token_id = 262
    vocabulary_size = 263
    digest = "bytes, version 1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def header(self, role: Role, *, is_first: bool = True) -> list[int]:
        return [257 + ROLES.index(role)]

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(
        self,
        path: Path,
        *,
        image_token: str,
        end_token: str,
        newline_token: str = "",
        start_token: str = "",
        audio_token: str = "",
    ):
        self._tokenizer, content = read_tokenizer(path)
        # Special tokens spelt in a text are then split like any other text.
        self._tokenizer.encode_special_tokens = True
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        given = {"image_token": image_token, "end_token": end_token, "start_token": start_token}
        # Joined where there is one, so that the digests of runs without sounds stay what they were.
        given |= {"audio_token": audio_token} if audio_token else {}
        control = {setting: token for setting, token in given.items() if token or setting == "end_token"}
        for setting, token in control.items():
            if token not in added or len(token) < 2:
                raise _refusal(
                    path,
                    f"no added token {token!r}, the value of data.{setting}",
                    f"set data.{setting} to one of: {', '.join(sorted(added)[:20]) or '(the file has none)'}",
                )
        if len(set(control.values())) < len(control):
            raise _refusal(path, f"one token for several of {', '.join(control)}", "set different tokens")
        self.end_token_id = added[end_token]
        # Without a token for pictures or sounds there are none: a place that no text can take.
        self.image_token_id = added[image_token] if image_token else -1
        self.audio_token_id = added[audio_token] if audio_token else -1
        self.newline_token_id = self._tokenizer.token_to_id(newline_token) if newline_token else None
        if newline_token and self.newline_token_id is None:
            remedy = "set data.newline_token to a token of the file"
            raise _refusal(path, f"no token {newline_token!r}, the value of data.newline_token", remedy)
        self._start_token_id = added[start_token] if start_token else None
        if (begin_token := _begin_token(path)) and begin_token not in added:
            raise _refusal(path, f"no added token {begin_token!r}, the bos_token beside it", "take both files anew")
        # A conversation that opens with it anyway is not given it twice.
        self._opening = [added[begin_token]] if begin_token and begin_token != start_token else []
        if self._opening:
            control["bos_token"] = given["bos_token"] = begin_token
        self.pad_token_id = self.end_token_id
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values())
        self.digest = hashlib.sha256(content + "\n".join(given.values()).encode()).hexdigest()
        self._path = path
        self._control = {added[token] for token in control.values()}
        # Between the first character of a control token and its rest.
        self._cuts = re.compile(
            "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in control.values())
        )

    def encode(self, text: str) -> list[int]:
        ids = self._encode(text)
        if not self._control.isdisjoint(ids):
            # The file does not mark the token special, or its vocabulary holds the token as a word: cut it in two.
            ids = encode_cut(self._tokenizer, self._cuts.split(text))
        if not self._control.isdisjoint(ids):
            raise _refusal(
                self._path,
                "ordinary text that becomes a control token",
                "choose tokens that no text is normalised to for data.image_token, audio_token and end_token",
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def header(self, role: Role, *, is_first: bool = True) -> list[int]:
        opening, before = self.encode(f"{role}\n"), self._opening if is_first else []
        if self._start_token_id is None:
            return [*before, *opening]
        return [*before, *([] if is_first else self.encode("\n")), self._start_token_id, *opening]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token not in self._control], skip_special_tokens=True)


def _begin_token(path: Path) -> str:
    """The text of the token that opens what the tokenizer of this file encodes; empty for none."""
    settings = read_object(path.with_name("tokenizer_config.json"))
    if settings.get("add_bos_token") is not True:
        return ""
    if token := special_tokens(settings).get("bos_token"):
        return token
    where = path.with_name("tokenizer_config.json")
    raise _refusal(where, "add_bos_token true and no bos_token", "add the token, or set add_bos_token to false")


def encode_cut(tokenizer: tokenizers.Tokenizer, pieces: Sequence[str]) -> list[int]:
    """Ids of a text that is cut into `pieces`: no token reaches over a cut, and no space is put there.

    Some tokenizers begin a text with a space; so a later piece is encoded behind a line break, which is taken off.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    first, *later = pieces
    encoded, line_break = ids(first), ids("\n")
    for piece in later:
        behind = ids(f"\n{piece}")
        is_apart = behind[: len(line_break)] == line_break
        encoded += behind[len(line_break) :] if is_apart else ids(piece)
    return encoded


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    """A `tokenizer.json`, which neither cuts nor pads, and its bytes.

    Raises:
      DataError: it cannot be used.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise _refusal(path, f"no readable file ({reason(error)})", "check the path in data.tokenizer") from error
    try:
        # The library raises plain Exception for all that is wrong with a file.
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        remedy = "download the file again"
        if content.startswith(b"version https://git-lfs"):
            remedy = "it is a git-lfs pointer: run git lfs pull"
        elif content.lstrip()[:1] == b"<":
            remedy = "it is an HTML page: the download failed"
        raise _refusal(path, f"{len(content):,} bytes that do not parse ({error})", remedy) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, content


def _refusal(path: Path, found: str, remedy: str) -> DataError:
    return DataError(str(path), found=found, expected="a usable tokenizer.json", remedy=remedy)
