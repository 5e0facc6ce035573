"""Tiny conversations on disk."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest


@pytest.fixture
def write_records(tmp_path: Path) -> Callable[..., str]:
    """Writes records (objects, or raw bytes of a line) to a JSONL and returns its path."""

    def write(*records: dict | bytes, name: str = "records.jsonl") -> str:
        lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return str(tmp_path / name)

    return write


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., str]:
    """Writes a PNG of one colour into the same folder and returns its name."""

    def write(name: str, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (8, 8)) -> str:
        PIL.Image.fromarray(np.full((size[1], size[0], 3), colour, np.uint8)).save(tmp_path / name)
        return name

    return write


@pytest.fixture
def chat() -> Callable[..., dict]:
    """A record of one question and one answer."""

    def record(question: str, answer: str, *images: str) -> dict:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "images": list(images)}

    return record
