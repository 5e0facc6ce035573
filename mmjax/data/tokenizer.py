"""Text to tokens: bytes, or a `tokenizer.json`. Control tokens come from the markup alone, never from text.

A message is written as

    header(role)  content  end token

where the header is one token of the bytes tokenizer, and the role's name and a line break ("user\\n") with a
`tokenizer.json`: a header stands only after an end token, so the same words inside a message are nothing but words.
A picture is one image token for each merged patch.
"""

import hashlib
import re
from pathlib import Path
from typing import Protocol

import tokenizers

from mmjax.config import DataConfig
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
    end_token_id: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text; whatever it spells, none of them is a control token."""
        ...

    def header(self, role: Role) -> list[int]:
        """Ids that open a message."""
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
            return FileTokenizer(Path(path), image_token=data.image_token, end_token=data.end_token)


class ByteTokenizer:
    """The 256 bytes of UTF-8, then pad, the roles, image, end of message."""

    pad_token_id = 256
    image_token_id = 260
    end_token_id = 261
    vocabulary_size = 262
    digest = "bytes, version 1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def header(self, role: Role) -> list[int]:
        return [257 + ROLES.index(role)]

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: Path, *, image_token: str, end_token: str):
        try:
            with open_regular(path) as file:
                content = file.read()
        except OSError as error:
            raise _refusal(path, f"no readable file ({reason(error)})", "check the path in data.tokenizer") from error
        try:
            # The library raises plain Exception for all that is wrong with a file.
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:
            remedy = "download the file again"
            if content.startswith(b"version https://git-lfs"):
                remedy = "it is a git-lfs pointer: run git lfs pull"
            elif content.lstrip()[:1] == b"<":
                remedy = "it is an HTML page: the download failed"
            raise _refusal(path, f"{len(content):,} bytes that do not parse ({error})", remedy) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Special tokens spelt in a text are then split like any other text.
        self._tokenizer.encode_special_tokens = True
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        for setting, token in (("image_token", image_token), ("end_token", end_token)):
            if token not in added or len(token) < 2:
                raise _refusal(
                    path,
                    f"no added token {token!r}, the value of data.{setting}",
                    f"set data.{setting} to one of: {', '.join(sorted(added)[:20]) or '(the file has none)'}",
                )
        if image_token == end_token:
            raise _refusal(path, f"{image_token!r} as image and as end token", "set two different tokens")
        self.image_token_id, self.end_token_id = added[image_token], added[end_token]
        self.pad_token_id = self.end_token_id
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values())
        self.digest = hashlib.sha256(content + f"{image_token}\n{end_token}".encode()).hexdigest()
        self._path = path
        self._control = {self.image_token_id, self.end_token_id}
        # Between the first character of a control token and its rest.
        self._cuts = re.compile(
            "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in (image_token, end_token))
        )

    def encode(self, text: str) -> list[int]:
        ids = self._encode(text)
        if not self._control.isdisjoint(ids):
            # The file does not mark the token special, or its vocabulary holds the token as a word: cut it in two.
            ids = [token for piece in self._cuts.split(text) for token in self._encode(piece)]
        if not self._control.isdisjoint(ids):
            raise _refusal(
                self._path,
                "ordinary text that becomes a control token",
                "choose tokens that no text is normalised to for data.image_token and data.end_token",
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def header(self, role: Role) -> list[int]:
        return self.encode(f"{role}\n")

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token not in self._control], skip_special_tokens=True)


def _refusal(path: Path, found: str, remedy: str) -> DataError:
    return DataError(str(path), found=found, expected="a usable tokenizer.json", remedy=remedy)
