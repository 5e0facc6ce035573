"""Write train.tar, held_out.tar and tokenizer.json: drawings of emoji by four artists, one of them held out, and names.

python scripts/emoji_captions.py PACKAGES FOLDER

PACKAGES holds the unpacked npm packages noto, openmoji, fluent-emoji-flat, twemoji (of @iconify-json) and
unicode-emoji-json. Needs resvg-py, which draws SVG.
"""

import io
import json
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import resvg_py
import tokenizers

ARTISTS = ("noto", "openmoji", "fluent-emoji-flat")
HELD_OUT_ARTIST = "twemoji"
GROUPS = {"Animals & Nature": "nature", "Food & Drink": "food"}
SIDE = 24
COPIES = 6
"""Of each drawing of the training artists; all but the first are moved, turned, mirrored and tinted."""


def main(packages: Path, folder: Path) -> None:
    """Names that all four artists have drawn. The same files each time."""
    table = json.loads((packages / "unicode-emoji-json" / "data-by-emoji.json").read_text(encoding="utf-8"))
    sets = {artist: IconSet(packages / artist) for artist in (*ARTISTS, HELD_OUT_ARTIST)}
    names = {
        code: (about["name"], about["group"])
        for emoji, about in table.items()
        if about["group"] in GROUPS and all((code := code_of(emoji)) in icons.names for icons in sets.values())
    }
    draw = random.Random(0)
    with Archive(folder / "train.tar") as archive:
        for artist in ARTISTS:
            for code, (name, group) in names.items():
                for copy in range(COPIES):
                    picture = sets[artist].drawn(code, draw if copy else None)
                    archive.add(f"{artist}-{code}-{copy}", picture, name, group)
    with Archive(folder / "held_out.tar") as archive:
        for code, (name, group) in names.items():
            archive.add(f"{HELD_OUT_ARTIST}-{code}", sets[HELD_OUT_ARTIST].drawn(code, None), name, group)
    write_tokenizer(folder / "tokenizer.json", [name for name, _ in names.values()])
    print(f"{folder}: {len(names)} names; {len(names) * len(ARTISTS)} drawings to learn, {len(names)} held out")


def code_of(emoji: str) -> str:
    """Its code points in hexadecimal, without the variation selector, which sets write or leave out."""
    return "-".join(f"{ord(character):x}" for character in emoji if character != "\ufe0f")


class IconSet:
    """One artist's SVG drawings."""

    def __init__(self, folder: Path):
        self._icons = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
        codes = json.loads((folder / "chars.json").read_text(encoding="utf-8"))
        self.names: dict[str, str] = {code.replace("-fe0f", ""): name for code, name in codes.items()}

    def drawn(self, code: str, draw: random.Random | None) -> bytes:
        """PNG on white; moved, turned, mirrored and tinted by `draw`."""
        name = self.names[code]
        if name not in self._icons["icons"]:
            name = self._icons["aliases"][name]["parent"]
        icon: dict[str, Any] = self._icons["icons"][name]
        width, height = (icon.get(side, self._icons.get(side, 16)) for side in ("width", "height"))
        body, gains = icon["body"], [1.0] * 3
        if draw is not None:
            size, turn = draw.uniform(0.8, 1.1), draw.uniform(-15, 15)
            x, y = (draw.uniform(0.43, 0.57) * side for side in (width, height))
            mirror = draw.choice((1, -1))
            moves = f"translate({x} {y}) rotate({turn}) scale({size * mirror} {size})"
            body = f'<g transform="{moves} translate({-width / 2} {-height / 2})">{body}</g>'
            gains = [draw.uniform(0.75, 1.25) for _ in gains]
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        svg = f'<svg {spaces} viewBox="0 0 {width} {height}">{body}</svg>'
        drawing = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, background="#ffffff"))
        pixels = np.asarray(PIL.Image.open(io.BytesIO(drawing)).convert("RGB").resize((SIDE, SIDE)), np.float32)
        # What is not white is tinted.
        tinted = (255 - (255 - pixels) * np.array(gains, np.float32)).clip(0, 255).round().astype(np.uint8)
        stream = io.BytesIO()
        PIL.Image.fromarray(tinted).save(stream, "PNG")
        return stream.getvalue()


class Archive:
    """A WebDataset tar of pictures and their names."""

    def __init__(self, path: Path):
        self._tar = tarfile.open(path, "w")  # noqa: SIM115

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def add(self, key: str, picture: bytes, name: str, group: str) -> None:
        """One sample."""
        question, answer = {"role": "user", "content": "<image>name"}, {"role": "assistant", "content": name}
        record = json.dumps({"messages": [question, answer], "kind": GROUPS[group]}, ensure_ascii=False)
        for ending, content in (("json", record.encode()), ("png", picture)):
            member = tarfile.TarInfo(f"{key.replace('.', '_')}.{ending}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))


def write_tokenizer(path: Path, names: list[str]) -> None:
    """A token for each word of the names."""
    control = ["<|media_pad|>", "<|end_of_msg|>"]
    words = sorted({word for name in names for word in name.split()} | {"name", "system", "user", "assistant"})
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *control, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
