"""Chat templates: rendered as transformers does; what is broken, forbidden or endless ends in one clear error."""

import json
import signal
import time
from pathlib import Path

import pytest

from mmjax.data import chat_template
from mmjax.data.chat_template import ChatTemplate, TemplateProcess, read_chat_template
from mmjax.errors import DataError

QUESTION = {"role": "user", "content": " What is <b>it</b>, “ä”? "}
CHATS = (
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "A cat."}, QUESTION],
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}],
)
TEMPLATES = {
    "plain": """{{ bos_token }}{% for message in messages %}
{% if loop.first and message.role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
    {%- if message.content is string %}
<|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
    {%- else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
    {%- endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "extensions": """{% set ns = namespace(count=0, seen=dict(a=1)) %}
{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{%- set ns.count = ns.count + 1 %}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ message | tojson }}{{ message | tojson(indent=2) }}{% endif %}
{%- if loop.index > 2 %}{% break %}{% endif %}{% endfor %}
{{ ns.count }} {{ ns.seen }} {{ dict.fromkeys(['k'], 0) }} {{ tools is none }} {{ unknown is defined }}""",
    "macros": """{% macro say(role, text) -%}[{{ role | upper }}] {{ text }}{%- endmacro %}
{% for message in messages[::-1] %}{{ say(message.role, message.content) }}
{% endfor %}{{ messages | map(attribute='role') | join(', ') }} {{ strftime_now('%Y-%m') }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_transformers_gives(name):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = [
        utilities._compile_jinja_template(TEMPLATES[name]).render(
            messages=chat, tools=None, documents=None, add_generation_prompt=True, **tokens
        )
        for chat in CHATS
    ]
    assert ChatTemplate("t", TEMPLATES[name], tokens).render(CHATS) == expected


def test_what_stops_a_run_leaves_it_its_templates():
    with TemplateProcess(ChatTemplate("t", "{{ messages[0].role }}", {})) as process:
        assert process.render([QUESTION]) == "user"
        for stop in (signal.SIGTERM, signal.SIGINT):
            process._process.send_signal(stop)
        assert process.render([QUESTION]) == "user"


def test_variables_are_given_to_the_template():
    template = ChatTemplate("t", "{{ add_generation_prompt }} {{ enable_thinking }}", {})
    assert template.render([[QUESTION]], add_generation_prompt=False, enable_thinking=True) == ["False True"]


HARMFUL = {
    "a shell": ("{{ cycler.__init__.__globals__.os.popen('touch {canary}').read() }}", "forbidden access"),
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' of a str"),
    "a class alone": ("{{ ''.__class__ }}", "'__class__' of a str"),
    "attributes by filter": ("{{ messages | map(attribute='__class__') | list }}", "'__class__' of a dict"),
    "attributes by format": ("{{ '{0.__class__}'.format(messages) }}", "'__class__' of a list"),
    "globals of a function": ("{{ raise_exception.__globals__ }}", "'__globals__' of a function"),
    "changed messages": ("{{ messages.append(1) }}", "'append' of a list"),
    "an underscored namespace": ("{% set ns = namespace(__init__=1) %}", "'__init__' of a namespace"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "a long range": ("{{ range(10**9) | list }}", "Range too big"),
    "much memory": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "much output": ("{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}", "more than 16,777,216 characters"),
    "endless macros": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "deep brackets": ("{{" + "(" * 100_000, "RecursionError"),
    "its own refusal": ("{{ raise_exception('no system role here') }}", "no system role here"),
    "broken syntax": ("a\n{% if %}", "t, line 2: found Expected an expression"),
    "an unknown attribute": ("a\n\n{{ messages[0].x.y }}", "t, line 3: found 'dict object' has no attribute 'x'"),
    "a long template": (" " * (chat_template.TEMPLATE_CHARACTERS + 1), "at most 1,048,576 characters"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_or_broken_template_is_one_error_and_does_nothing(name, tmp_path):
    text, found = HARMFUL[name]
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"^t\b") as raised:
        ChatTemplate("t", text.replace("{canary}", str(tmp_path / "canary")), {}).render([[QUESTION]])
    assert found in str(raised.value) and len(str(raised.value)) < 600
    assert time.monotonic() - begun < 10
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (7 ** 11) }}",  # one instruction that never comes back to the interpreter
    ],
)
def test_an_endless_template_is_ended(text, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    begun = time.monotonic()
    with pytest.raises(DataError, match="runs longer than 1 seconds"):
        ChatTemplate("t", text, {}).render([[QUESTION]])
    assert time.monotonic() - begun < 8


def test_the_time_starts_anew_with_each_conversation_and_an_error_names_it(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 2.0)
    busy = "{% for i in range(99999) %}{% for i in range(10) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    begun = time.monotonic()
    ChatTemplate("t", busy, {}).render([[{"role": "user", "content": "warm"}]])
    # Enough of them to take longer together than one may, on a fast machine too.
    count = max(12, round(4 / (time.monotonic() - begun)))
    chats = [[{"role": "user", "content": str(number)}] for number in range(count)]
    begun = time.monotonic()
    assert ChatTemplate("t", busy, {}).render(chats) == [str(number) for number in range(count)]
    assert time.monotonic() - begun > 2
    refusing = "{{ raise_exception('three') if messages[0].content == '3' }}"
    with pytest.raises(DataError, match=r"three \(conversation 4\)"):
        ChatTemplate("t", refusing, {}).render(chats)


def test_a_template_is_found_where_releases_put_it(tmp_path: Path):
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None, "chat_template": "{{ bos_token }}"})
    )
    assert read_chat_template(tmp_path).render([[]]) == ["<s>"]
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert read_chat_template(tmp_path).render([[]]) == ["d"]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert read_chat_template(tmp_path).render([[]]) == ["processor"]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path).render([[]]) == ["file"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("tokenizer_config.json", b'{"chat_template": 3}', "int"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag", "template": "d"}]}', ""),
        ("tokenizer_config.json", b"<html>", "Expecting value"),
        ("tokenizer_config.json", b"[]", "a list"),
        ("tokenizer_config.json", b"[" * 200_000, "recursion"),
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name, content, found):
    (tmp_path / name).write_bytes(content)
    if not found:
        assert read_chat_template(tmp_path) is None
        return
    with pytest.raises(DataError, match=name) as raised:
        read_chat_template(tmp_path)
    assert found in str(raised.value) and len(str(raised.value)) < 600
