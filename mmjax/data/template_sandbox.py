"""Renders a chat template in a process of its own, which the system ends when it takes too long: run as a script.

Reads one JSON object from standard input, {"template", "conversations": [variables, ...], "seconds", "memory_bytes",
"output_characters"}, and writes {"texts": [...]} or {"error", "line", "conversation", "is_forbidden"}. Imports nothing
of the project: it runs isolated, without environment, and what a template can reach is what stands here.
"""

import datetime
import json
import resource
import signal
import sys
import traceback

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

TEMPLATE_NAME = "<chat template>"


class IgnoredGenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks answers for training, is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Forbidden attributes raise where the stock sandbox would print nothing."""

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


def environment():
    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[IgnoredGenerationBlock, jinja2.ext.loopcontrols],
        cache_size=0,
    )
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda layout: datetime.datetime.now().strftime(layout),
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return made


def render_all(request, texts):
    """Append the texts of all conversations, each within the time that starts anew with it."""
    code = environment()
    compiled = code.template_class.from_code(
        code, code.compile(request["template"], filename=TEMPLATE_NAME), code.make_globals(None)
    )
    for variables in request["conversations"]:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        pieces, room = [], request["output_characters"]
        for piece in compiled.generate(variables):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise MemoryError(f"more than {request['output_characters']:,} characters")
        texts.append("".join(pieces))


def line_of(error):
    if isinstance(error, jinja2.exceptions.TemplateSyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TEMPLATE_NAME]
    return lines[-1] if lines else None


def main():
    request = json.load(sys.stdin.buffer)
    for limit, value in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # The signal's default: the process ends, whatever it is doing.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    texts = []
    try:
        render_all(request, texts)
        answer = {"texts": texts}
    except Exception as error:
        # Templates raise all kinds of errors; each is told by its kind and text.
        name = type(error).__name__
        text = str(error) or name
        answer = {
            "error": text if isinstance(error, jinja2.exceptions.TemplateError) else f"{name}: {text}",
            "line": line_of(error),
            "conversation": len(texts) + 1,
            "is_forbidden": isinstance(error, jinja2.exceptions.SecurityError),
        }
    signal.setitimer(signal.ITIMER_REAL, 0)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
