"""The three forms of a record mean the same; what is none of them is refused by name."""

from typing import Any

import pytest

from mmjax.data.sources.conversation import ImageFile, Picture
from mmjax.data.sources.records import RecordReader
from mmjax.errors import DataError


def read(record: Any) -> list[tuple[str, list[str], bool]]:
    """(role, texts and picture paths, is learned) of each message."""

    def picture(path: Any) -> Picture:
        return ImageFile(where="here", root=None, path=path)  # type: ignore[arg-type]

    sample = RecordReader("records, line 3", picture).read(record)
    return [
        (
            message.role,
            [part.path if isinstance(part, ImageFile) else str(part) for part in message.parts if part != ""],
            message.is_supervised,
        )
        for message in sample.messages
    ]


MEANING = [
    ("system", ["be brief"], False),
    ("user", ["a.png", "b.png", "which is red?"], False),
    ("assistant", ["the first"], True),
]
FORMS = {
    "markers": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "<image><image>which is red?"},
            {"role": "assistant", "content": "the first"},
        ],
        "images": ["a.png", "b.png"],
    },
    "parts of OpenAI": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.png"}},
                    {"type": "image_url", "image_url": {"url": "b.png", "detail": None}},
                    {"type": "text", "text": "which is red?"},
                ],
            },
            {"role": "assistant", "content": "the first"},
        ]
    },
    "parts of Hugging Face": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [
                    {"type": "image", "text": None, "image": "a.png"},
                    {"type": "image", "path": "b.png"},
                    {"type": "text", "text": "which is red?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "the first"}]},
        ]
    },
    "ShareGPT": {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "<image><image>which is red?"},
            {"from": "gpt", "value": "the first"},
        ],
        "images": ["a.png", "b.png"],
    },
    "LLaVA": {
        "id": "000000033471",
        "image": ["a.png", "b.png"],
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "user", "value": "<image><image>which is red?"},
            {"from": "assistant", "value": "the first"},
        ],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_conversation_reads_the_same(form):
    assert read(FORMS[form]) == MEANING


def test_one_picture_of_llava_needs_no_list():
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]
    assert read({"image": "a.png", "conversations": turns})[0] == ("user", ["a.png", "\nwhat?"], False)


def test_a_record_may_say_what_kind_of_question_it_asks():
    record = {"messages": [{"role": "assistant", "content": "x"}]}
    kinds = [
        RecordReader("here", lambda path: path).read(record | more).kind for more in ({"kind": "sum"}, {"kind": 3}, {})
    ]
    assert kinds == ["sum", "", ""]


@pytest.mark.parametrize("switch", [{"weight": 0}, {"loss": False}, {"weight": 1, "loss": 0}])
def test_an_answer_can_be_kept_out_of_the_loss_in_both_forms(switch):
    turn = {"role": "assistant", "content": "no"}
    record = {"messages": [{**turn, **switch}, {**turn, "weight": None}]}
    assert [is_learned for _, _, is_learned in read(record)] == [False, True]
    turn = {"from": "gpt", "value": "no"}
    assert [is_learned for _, _, is_learned in read({"conversations": [{**turn, **switch}, turn]})] == [False, True]


BAD = {
    "sender": ({"conversations": [{"from": "bing", "value": "x"}]}, "message 1: found \"from\" 'bing'"),
    "sender of another type": ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "message 1"),
    "turn of another type": ({"conversations": ["x"]}, "message 1"),
    "unknown key of a turn": ({"conversations": [{"from": "gpt", "value": "x", "markdown": 1}]}, '"markdown"'),
    "no value": ({"conversations": [{"from": "gpt"}]}, "content None"),
    "conversations of another type": ({"conversations": {}}, '"messages" or "conversations"'),
    "both image keys": (
        {"image": "a", "images": ["a"], "conversations": [{"from": "gpt", "value": "x"}]},
        'both "image" and "images"',
    ),
    "one image too few": ({"image": "a", "conversations": [{"from": "gpt", "value": "<image><image>"}]}, "2 image"),
    "one image too many": ({"images": ["a", "b"], "conversations": [{"from": "gpt", "value": "<image>"}]}, "2 images"),
    "an empty conversation": ({"conversations": []}, "an empty conversation"),
    "a sound where none is read": ({"audio": "a.wav", "conversations": [{"from": "gpt", "value": "x"}]}, '"audio"'),
    "tools": ({"tools": ["a"], "conversations": [{"from": "gpt", "value": "x"}]}, '"tools"'),
    "loss of another type": ({"messages": [{"role": "assistant", "content": "x", "loss": "yes"}]}, "loss 'yes'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_record_of_no_form_is_refused_by_name(kind):
    record, words = BAD[kind]
    with pytest.raises(DataError) as caught:
        read(record)
    assert str(caught.value).startswith("records, line 3") and words in str(caught.value)
