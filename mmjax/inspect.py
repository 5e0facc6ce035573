"""`python -m mmjax.inspect`: what the model will see of a file, in the terminal and as an HTML page."""

import argparse
import base64
import dataclasses
import html
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import PIL.Image
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmjax.checkpoint.tower_weights import read_audio
from mmjax.checkpoint.weights import read_model
from mmjax.config import ConfigurationFaults, DataConfig, RunConfig, check, saved
from mmjax.data.align import Document, read_pixels
from mmjax.data.loader import Loader
from mmjax.data.tokenizer import Tokenizer
from mmjax.errors import MmjaxError, writing

Kind = Literal["learned", "read", "picture", "sound"]
"""Of a token: its prediction counts in the loss; it is read only; a feature of a picture or sound stands there."""
STYLES: dict[Kind, str] = {"learned": "bold green", "read": "default", "picture": "magenta", "sound": "cyan"}
SEGMENT_BACKGROUNDS = ("", " on grey15")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Show the rows that the first step of a run would take from a file: tokens coloured by loss and by document.

    python -m mmjax.inspect train.jsonl --data.row-tokens 2048 --html rows.html
    """

    file: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FILE")]]
    """What `data.source` may be: a .jsonl, .parquet, .tar or .array_record, or several."""
    config: Annotated[str, tyro.conf.arg(metavar="RUN.YAML")] = ""
    """Start from the settings of a run."""
    rows: int = 4
    """How many rows are shown."""
    html: Annotated[str, tyro.conf.arg(metavar="PAGE")] = ""
    """Write an HTML page with the pictures in place, too."""
    settings: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = dataclasses.field(
        default_factory=RunConfig
    )


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One row of the first step."""

    documents: list[Document]
    fill: float
    """Share of its positions that hold a document."""
    patch_fill: float
    """Share of its patch room that is used; 0 without any."""
    cost_share: float
    """Its predicted cost over the mean of the step's rows."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive tokens of one kind."""

    kind: Kind
    texts: list[str]
    """Of each token; empty for a picture or sound."""
    number: int = -1
    """Of the picture or sound in its document."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What a person can mend is one message, never a traceback."""
    try:
        command = read_command(sys.argv[1:] if arguments is None else arguments)
        faults = check(command.settings)
        if faults:
            raise ConfigurationFaults("settings", faults)
        show(command, Console())
    except MmjaxError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    return 0


def read_command(arguments: Sequence[str]) -> Command:
    """The command line; bad and long samples are left out and listed unless the options say otherwise."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--weights", "--audio-weights"):
        scan.add_argument(name, default="")
    start, _ = scan.parse_known_args(arguments)
    data = DataConfig(bad_sample="skip", too_long="drop", max_bad_share=0.999)
    settings = saved.load(start.config) if start.config else RunConfig(data=data)
    model = read_model(start.weights) if start.weights else settings.model
    if start.audio_weights:
        model = dataclasses.replace(model, audio=read_audio(start.audio_weights, model.audio))
    settings = dataclasses.replace(settings, model=model)
    command = tyro.cli(
        Command, default=Command(file=tyro.MISSING, settings=settings), args=arguments, prog="python -m mmjax.inspect"
    )
    data = dataclasses.replace(command.settings.data, source=command.file)
    return dataclasses.replace(command, settings=dataclasses.replace(command.settings, data=data))


def show(command: Command, console: Console) -> None:
    """Print the summary and the rows, and write the page if one is asked for."""
    settings = command.settings
    loader = Loader(settings.data, settings.model.vision, settings.seed, model=settings.model)
    rows = list(read_rows(loader, settings, command.rows))
    for table in (summary(loader), rejections(loader)):
        if table.row_count:
            console.print(table)
    for number, row in enumerate(rows, 1):
        console.print(f"\n[bold]row {number}[/bold]  {describe(row)}")
        for segment, document in enumerate(row.documents):
            console.print(Text(document.where, style="dim"))
            console.print(coloured(document, loader.tokenizer, segment))
    console.print("\n", Text("learned", style=STYLES["learned"]), Text("read", style=STYLES["read"]), end="")
    console.print(Text(" picture", style=STYLES["picture"]), Text("sound", style=STYLES["sound"]))
    if command.html:
        with writing(command.html):
            Path(command.html).write_text(page(command.file, rows, loader, settings), encoding="utf-8")
        console.print(f"written: {command.html}")


def read_rows(loader: Loader, settings: RunConfig, count: int) -> Iterator[ShownRow]:
    """The first rows of the first step."""
    planned = loader.planned_rows(0)
    costs = [sum(loader.sample_cost(sample) for sample in row) for row in planned]
    mean = max(1.0, float(np.mean(costs)))
    for samples, cost in list(zip(planned, costs, strict=True))[:count]:
        documents = [packed.document for packed in loader.read_row(samples, 0)]
        patches = sum(document.num_patches for document in documents)
        yield ShownRow(
            documents=documents,
            fill=sum(len(document.tokens) for document in documents) / settings.data.row_tokens,
            patch_fill=patches / settings.data.row_patches if settings.data.row_patches else 0.0,
            cost_share=cost / mean,
        )


def describe(row: ShownRow) -> str:
    """Fill and cost in words."""
    learned = sum(document.sizes.supervised for document in row.documents)
    return (
        f"{len(row.documents)} samples, {learned:,} learned tokens, fill {row.fill:.1%}, patches {row.patch_fill:.1%},"
        f" cost {row.cost_share:.2f} x mean"
    )


def summary(loader: Loader) -> Table:
    """What the loader counted."""
    table = Table("samples", "", title="data", title_justify="left")
    for name, value in loader.counters().items():
        table.add_row(name.replace("_", " "), f"{value:,.6g}")
    return table


def rejections(loader: Loader) -> Table:
    """The first bad records, each with its reason."""
    table = Table("left out", "reason", title="bad records", title_justify="left")
    for record in loader.rejected[:20]:
        table.add_row(Text(record.where), Text(record.reason))
    return table


def runs(document: Document, tokenizer: Tokenizer) -> Iterator[Run]:
    """The document's tokens in runs of one kind, each picture and sound by itself."""
    media: tuple[tuple[Kind, list[slice]], ...] = (
        ("picture", document.picture_spans()),
        ("sound", document.sound_spans()),
    )
    starts: dict[int, tuple[int, Kind, int]] = {
        span.start: (span.stop, kind, number) for kind, spans in media for number, span in enumerate(spans)
    }
    place = 0
    while place < len(document.tokens):
        if place in starts:
            stop, kind, number = starts[place]
            yield Run(kind=kind, texts=[], number=number)
        else:
            is_learned = bool(document.is_supervised[place])
            stop = place + 1
            while (
                stop < len(document.tokens) and stop not in starts and bool(document.is_supervised[stop]) == is_learned
            ):
                stop += 1
            texts = [_token_text(int(token), tokenizer) for token in document.tokens[place:stop]]
            yield Run(kind="learned" if is_learned else "read", texts=texts)
        place = stop


def _token_text(token: int, tokenizer: Tokenizer) -> str:
    if token == tokenizer.end_token_id:
        return "⏎end\n"
    return tokenizer.decode([token]) or f"⟨{token}⟩"


def coloured(document: Document, tokenizer: Tokenizer, segment: int) -> Text:
    """The document for the terminal."""
    text = Text()
    for run in runs(document, tokenizer):
        style = STYLES[run.kind] + SEGMENT_BACKGROUNDS[segment % 2]
        if run.number >= 0:
            text.append(f"[{_medium_name(document, run)}]", style=style)
        text.append("".join(run.texts), style=style)
    return text


def _medium_name(document: Document, run: Run) -> str:
    if run.kind == "sound":
        sound = document.sounds[run.number]
        return f"{sound.sound.kind} {sound.sound.path}, {sound.num_clips} clips, {sound.num_features} tokens"
    placed = document.pictures[run.number]
    return f"picture {placed.size[0]}x{placed.size[1]}, {placed.num_patches} patches, {placed.num_features} tokens"


STYLE_SHEET = """
body { font: 14px/1.5 ui-monospace, monospace; margin: 2em; max-width: 90em; }
.document { white-space: pre-wrap; overflow-wrap: anywhere; padding: .4em; margin: .4em 0; }
.document { border-left: .4em solid #bbb; }
.document:nth-child(even) { background: #f3f3f3; border-color: #69c; }
.learned { color: #064; background: #bdf0cf; }
.learned span:nth-child(even) { background: #d9f7e4; }
.read span:nth-child(even) { background: #e8e8e8; }
.where { color: #777; }
.sound { color: #a3a; background: #f7e6f7; }
img { vertical-align: middle; min-width: 32px; image-rendering: pixelated; border: 2px solid #a3a; }
table { border-collapse: collapse; } td { border: 1px solid #ccc; padding: .1em .6em; }
.bar { background: #ddd; width: 20em; } .bar div { background: #69c; height: .7em; }
"""


def page(title: str, rows: Sequence[ShownRow], loader: Loader, settings: RunConfig) -> str:
    """The rows as one HTML page that holds everything it shows."""
    counted = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{value:,.6g}</td></tr>"
        for name, value in loader.counters().items()
    )
    bad = "".join(
        f"<tr><td>{html.escape(record.where)}</td><td>{html.escape(record.reason)}</td></tr>"
        for record in loader.rejected[:200]
    )
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE_SHEET}</style>",
        f"<h1>{html.escape(title)}</h1><p><span class=learned>learned</span> read <span>picture</span>",
        "<span class=sound>sound</span></p>",
        f"<table>{counted}</table>" + (f"<h2>bad records</h2><table>{bad}</table>" if bad else ""),
    ]
    for number, row in enumerate(rows, 1):
        bars = _bar(row.fill) + _bar(row.patch_fill)
        parts.append(f"<h2>row {number}</h2><p>{html.escape(describe(row))}</p>{bars}<div>")
        parts += [_document_html(document, loader.tokenizer, settings) for document in row.documents]
        parts.append("</div>")
    return "\n".join(parts)


def _bar(share: float) -> str:
    return f"<div class=bar><div style='width:{min(1.0, share):.1%}'></div></div>"


def _document_html(document: Document, tokenizer: Tokenizer, settings: RunConfig) -> str:
    parts = []
    for run in runs(document, tokenizer):
        if run.kind == "picture":
            placed = document.pictures[run.number]
            name = html.escape(_medium_name(document, run))
            source = _data_url(read_pixels(placed, settings.data, settings.model.vision))
            parts.append(f"<img title='{name}' alt='{name}' src='{source}'>")
        elif run.kind == "sound":
            parts.append(f"<span class=sound>[{html.escape(_medium_name(document, run))}]</span>")
        else:
            tokens = "".join(f"<span>{html.escape(text)}</span>" for text in run.texts)
            parts.append(f"<span class={run.kind}>{tokens}</span>")
    return f"<div class=document><div class=where>{html.escape(document.where)}</div>{''.join(parts)}</div>"


def _data_url(pixels: np.ndarray) -> str:
    stream = io.BytesIO()
    PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


if __name__ == "__main__":
    sys.exit(main())
