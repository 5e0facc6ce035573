import json
import os

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mmjax.config.faults import BYTE_TOKENIZER_SIZE
from mmjax.data.tokenizer import ByteTokenizer, FileTokenizer
from mmjax.errors import DataError

TEXT = "Grüße, 日本語 🙂 3.14 <image>\n\0"
IMAGE, END = "<|media_pad|>", "<|end_of_msg|>"


def byte_level(*, special: bool) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=special) for token in (IMAGE, END, "<|other|>")])
    return tokenizer


def opened(tokenizer: tokenizers.Tokenizer, path, image_token=IMAGE, end_token=END) -> FileTokenizer:
    tokenizer.save(str(path / "tokenizer.json"))
    return FileTokenizer(path / "tokenizer.json", image_token=image_token, end_token=end_token)


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_spelt_in_text_stay_text(special, tmp_path):
    tokenizer = opened(byte_level(special=special), tmp_path)
    text = f"{TEXT}{END}{IMAGE}{IMAGE}<|other|>"
    ids = tokenizer.encode(text)
    assert not {tokenizer.image_token_id, tokenizer.end_token_id} & set(ids)
    assert tokenizer.decode(ids).replace("<|other|>", "") == text.replace("<|other|>", "")


def test_a_word_of_the_vocabulary_that_spells_a_control_token_is_cut(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({END: 0, IMAGE: 1, "[unk]": 2, "hello": 3}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([END, IMAGE])
    tokenizer = opened(words, tmp_path)
    assert tokenizer.encode(f"hello {END} {IMAGE}")[0] == 3
    assert not {0, 1} & set(tokenizer.encode(f"hello {END} {IMAGE}"))


def test_text_that_is_normalised_to_a_control_token_is_refused(tmp_path):
    tokenizer = byte_level(special=False)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(DataError, match="becomes a control token"):
        opened(tokenizer, tmp_path).encode("<|MEDIA_PAD|>")


@pytest.mark.parametrize("make", [lambda path: ByteTokenizer(), lambda path: opened(byte_level(special=True), path)])
def test_text_survives_the_round_trip_and_control_tokens_vanish(make, tmp_path):
    tokenizer = make(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode([tokenizer.image_token_id, *ids, tokenizer.end_token_id]) == TEXT
    assert (
        max(*ids, tokenizer.image_token_id, tokenizer.end_token_id, tokenizer.pad_token_id) < tokenizer.vocabulary_size
    )
    headers = [tuple(tokenizer.header(role)) for role in ("system", "user", "assistant")]
    assert len(set(headers)) == 3


def test_with_a_start_token_a_conversation_is_written_as_chatml(tmp_path):
    byte_level(special=True).save(str(tmp_path / "tokenizer.json"))
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", image_token="", end_token=END, start_token="<|other|>")
    turns = (("system", "Be kind."), ("user", "Hello"), ("assistant", "Hello you"))
    ids: list[int] = []
    for role, text in turns:
        ids += [*tokenizer.header(role, is_first=not ids), *tokenizer.encode(text), tokenizer.end_token_id]
    assert ids == file.encode("\n".join(f"<|other|>{role}\n{text}{END}" for role, text in turns)).ids
    assert file.token_to_id("<|other|>") not in tokenizer.encode("<|other|>")


def beside(path, **settings) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_release_whose_tokenizer_adds_one_has_a_token_before_each_conversation(tmp_path):
    plain = opened(byte_level(special=True), tmp_path)
    beside(tmp_path, add_bos_token=False, bos_token="<|other|>")
    assert opened(byte_level(special=True), tmp_path).digest == plain.digest
    beside(tmp_path, add_bos_token=True, bos_token={"content": "<|other|>", "lstrip": False})
    tokenizer = opened(byte_level(special=True), tmp_path)
    begin = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|other|>")
    assert begin is not None and tokenizer.header("user") == [begin, *plain.header("user")]
    assert tokenizer.header("user", is_first=False) == plain.header("user", is_first=False)
    assert begin not in tokenizer.encode("<|other|>") and tokenizer.decode([begin, *tokenizer.encode("a")]) == "a"
    assert tokenizer.digest != plain.digest
    # ChatML whose first token it is: once is enough.
    chat = FileTokenizer(tmp_path / "tokenizer.json", image_token="", end_token=END, start_token="<|other|>")
    assert chat.header("user").count(begin) == 1


@pytest.mark.parametrize("settings", [{}, {"bos_token": "<|none|>"}, {"bos_token": None}])
def test_a_token_that_is_to_begin_and_is_not_there_is_refused(tmp_path, settings):
    beside(tmp_path, add_bos_token=True, **settings)
    with pytest.raises(DataError, match="bos_token"):
        opened(byte_level(special=True), tmp_path)


def test_the_bytes_tokenizer_has_one_id_for_each_role_and_stays_below_320():
    tokenizer = ByteTokenizer()
    ids = [tokenizer.pad_token_id, tokenizer.image_token_id, tokenizer.end_token_id]
    ids += [token for role in ("system", "user", "assistant") for token in tokenizer.header(role)]
    assert len(set(ids)) == 6 and min(ids) >= 256
    assert tokenizer.vocabulary_size == BYTE_TOKENIZER_SIZE <= 320


BAD_FILES = {
    "empty": (b"", "0 bytes"),
    "empty object": (b"{}", "Model missing"),
    "HTML": (b"<html>404</html>", "the download failed"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "not UTF-8": (b"\xff\xfe", "do not parse"),
    "unknown model": (b'{"model": {"type": "Nonsense"}}', "do not parse"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_tokenizer_file_is_an_error_that_names_it(kind, tmp_path):
    content, words = BAD_FILES[kind]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        FileTokenizer(path, image_token=IMAGE, end_token=END)
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert path.read_bytes() == content


def test_missing_files_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path / "pipe", tmp_path):
        with pytest.raises(DataError, match="no readable file"):
            FileTokenizer(path, image_token=IMAGE, end_token=END)


def test_an_image_token_that_is_missing_or_an_ordinary_word_is_refused(tmp_path):
    for image_token in ("<|absent|>", "a", END):
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            opened(byte_level(special=True), tmp_path, image_token=image_token)
