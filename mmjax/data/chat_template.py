"""Chat templates of released models: read from a tokenizer's folder, and rendered where they can do no harm.

A template is a program that came with the weights. It runs in a process without environment or rights
(`template_sandbox`), within limits of time, memory and size for each conversation, and reaches plain values only.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.data import template_sandbox
from mmjax.data.files import open_regular, reason
from mmjax.errors import DataError

SECONDS = 5.0
"""Time for one conversation."""
MEMORY_BYTES = 768 * 2**20
OUTPUT_CHARACTERS = 16 * 2**20
TEMPLATE_CHARACTERS = 2**20
LARGEST_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ChatTemplate:
    """A template, where it stands, and the special tokens it may name (`bos_token`, ...)."""

    where: str
    text: str
    tokens: Mapping[str, str]

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, has_clock: bool = True, **variables: Any
    ) -> list[str]:
        """Each conversation (messages of plain values) as text, up to where the assistant answers.

        Raises:
          DataError: the template is broken, refuses a conversation, does what is forbidden, or passes a limit.
        """
        with TemplateProcess(self, has_clock=has_clock) as process:
            return [
                process.render(messages, name=f"conversation {number}" if len(conversations) > 1 else "", **variables)
                for number, messages in enumerate(conversations, 1)
            ]

    def refusal(self, found: str, expected: str, remedy: str, line: int | None = None) -> DataError:
        """An error of the template."""
        where = self.where if line is None else f"{self.where}, line {line}"
        return DataError(where, found=found, expected=expected, remedy=remedy)


class TemplateProcess:
    """The process that renders conversations of one template; started when needed, and anew after one that ended."""

    def __init__(self, template: ChatTemplate, *, marks: tuple[str, str] = ("", ""), has_clock: bool = True):
        """`marks` stand around what the template says an assistant generates; without a clock no text has a date."""
        self._template, self._marks, self._has_clock = template, marks, has_clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "TemplateProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._end()
            self._process = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, name: str = "", **variables: Any) -> str:
        """A conversation as text; `name` is what an error calls it.

        Raises:
          DataError: the template is broken, refuses the conversation, does what is forbidden, or passes a limit.
        """
        common = {"tools": None, "documents": None, "add_generation_prompt": True, **self._template.tokens}
        with self._lock:
            answer = self._ask(common | variables | {"messages": list(messages)})
        if "error" not in answer:
            return answer["text"]
        found = " ".join(answer["error"].split())[:300]
        if name:
            found = f"{found} ({name})"
        if answer["is_forbidden"]:
            raise self._template.refusal(
                f"a forbidden access: {found}",
                "a template that reads its messages only",
                "do not trust where it came from",
                answer["line"],
            )
        remedy = "check the messages, or mend or replace the template"
        raise self._template.refusal(found, "a text", remedy, answer["line"])

    def _ask(self, variables: dict[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(variables).encode() + b"\n")
            process.stdin.flush()
        try:
            return json.loads(process.stdout.readline())
        except ValueError as error:
            message = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            code = process.wait()
            self.close()
            if code == -signal.SIGALRM:
                found = f"a template that runs longer than {SECONDS:g} seconds"
                raise self._template.refusal(found, "one that ends", "look for its endless loop") from error
            last = (message or [f"exit {code}"])[0]
            found = f"a template that breaks its process ({last})"
            raise self._template.refusal(found, "a text", "use another") from error

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None:
            return self._process
        text = self._template.text
        if len(text) > TEMPLATE_CHARACTERS:
            expected = f"at most {TEMPLATE_CHARACTERS:,} characters"
            raise self._template.refusal(f"{len(text):,} characters", expected, "use a smaller one")
        setup = {
            "template": text,
            "seconds": SECONDS,
            "memory_bytes": MEMORY_BYTES,
            "output_characters": OUTPUT_CHARACTERS,
            "marks": self._marks,
            "has_clock": self._has_clock,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", template_sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Where the interpreter itself may need to find its libraries.
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(setup).encode() + b"\n")
        # Also where nobody closes it, and when the interpreter ends.
        self._end = weakref.finalize(self, _end, process)
        self._process = process
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    # Reads what is left and closes all pipes.
    process.communicate()


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template in a folder of tokenizer files; None without one.

    It is chat_template.jinja, or stands in chat_template.json (a processor's) or tokenizer_config.json.

    Raises:
      DataError: a file cannot be used.
    """
    if (folder / "chat_template.jinja").exists():
        return read_template_file(folder / "chat_template.jinja", folder)
    config = read_object(folder / "tokenizer_config.json")
    name = "chat_template.json" if (folder / "chat_template.json").exists() else "tokenizer_config.json"
    template = read_object(folder / name).get("chat_template")
    if isinstance(template, list):
        # Several by name; `default` is the one for chats without tools.
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get(
            "default"
        )
    if template is None:
        return None
    where = f"{folder / name}, chat_template"
    if not isinstance(template, str):
        raise DataError(
            where, found=type(template).__name__, expected="a text, or one named default", remedy="download it again"
        )
    return ChatTemplate(where, template, special_tokens(config))


def read_template_file(path: Path, folder: Path) -> ChatTemplate:
    """A template in a file of its own, for the tokenizer in `folder`.

    Raises:
      DataError: a file cannot be used.
    """
    try:
        with open_regular(path) as file:
            text = file.read(4 * TEMPLATE_CHARACTERS + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        found = reason(error) if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise DataError(str(path), found=found, expected="a chat template", remedy="download the file again") from error
    return ChatTemplate(str(path), text, special_tokens(read_object(folder / "tokenizer_config.json")))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token` and its like in a tokenizer_config.json."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; {} where there is no such file.

    Raises:
      DataError: it cannot be used.
    """
    if not path.exists():
        return {}
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_JSON_BYTES + 1)
        if len(content) > LARGEST_JSON_BYTES:
            raise ValueError(f"more than {LARGEST_JSON_BYTES:,} bytes")
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        found = reason(error) if isinstance(error, OSError) else str(error)
        raise DataError(
            str(path), found=found[:200], expected="a JSON object", remedy="download the file again"
        ) from error
    return values
