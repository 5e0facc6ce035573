"""Renders a chat template in a process of its own, which the system ends when it takes too long: run as a script.

Reads lines of JSON from standard input: first {"template", "seconds", "memory_bytes", "output_characters", "marks",
"has_clock"}, then the variables of one conversation a line. Answers each line with one: {"text"}, or {"error", "line",
"is_forbidden"}. Imports nothing of the project: it runs isolated, without environment, and what a template can reach is
what stands here.
"""

import datetime
import json
import resource
import signal
import sys
import traceback
import typing

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

TEMPLATE_NAME = "<chat template>"


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks answers for training: what is inside, between marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = typing.cast(Sandbox, self.environment).marks
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in marks)
        return jinja2.nodes.Scope([begin, *body, end]).set_lineno(line)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Forbidden attributes raise where the stock sandbox would print nothing."""

    marks = ("", "")
    """What stands around the output of a generation block."""

    def unsafe_undefined(self, obj, attribute):
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")


class TemplateNamespace(jinja2.utils.Namespace):
    """jinja's `namespace`, without names that begin with an underscore."""

    def __init__(self, *args, **values):
        super().__init__()
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"attribute {name!r} of a namespace")
        super().__setitem__(name, value)


class TemplateDict:
    """`dict` as templates may use it: a type would give them its attributes."""

    def __call__(self, *args, **values):
        return dict(*args, **values)

    def fromkeys(self, *args):
        return dict.fromkeys(*args)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(marks, *, has_clock):
    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        cache_size=0,
    )
    made.marks = marks
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    if has_clock:
        made.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return made


def compiled(setup):
    code = environment(setup["marks"], has_clock=setup["has_clock"])
    return code.template_class.from_code(
        code, code.compile(setup["template"], filename=TEMPLATE_NAME), code.make_globals(None)
    )


def rendered(template, variables, output_characters):
    pieces, room = [], output_characters
    for piece in template.generate(variables):
        pieces.append(piece)
        room -= len(piece)
        if room < 0:
            raise MemoryError(f"more than {output_characters:,} characters")
    return "".join(pieces)


def line_of(error):
    if isinstance(error, jinja2.exceptions.TemplateSyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TEMPLATE_NAME]
    return lines[-1] if lines else None


def main():
    setup = json.loads(sys.stdin.buffer.readline())
    for limit, value in (
        (resource.RLIMIT_AS, setup["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # What stops a run reaches its whole group (Ctrl-C, Slurm), and the run still needs this process for its last step.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    # The signal's default: the process ends, whatever it is doing.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    template = None
    for line in sys.stdin.buffer:
        # The time starts anew with each conversation.
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
        try:
            template = template or compiled(setup)
            answer = {"text": rendered(template, json.loads(line), setup["output_characters"])}
        except Exception as error:
            # Templates raise all kinds of errors; each is told by its kind and text.
            name = type(error).__name__
            text = str(error) or name
            answer = {
                "error": text if isinstance(error, jinja2.exceptions.TemplateError) else f"{name}: {text}",
                "line": line_of(error),
                "is_forbidden": isinstance(error, jinja2.exceptions.SecurityError),
            }
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
