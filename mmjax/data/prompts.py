"""Prompts: conversations that end with a question, or plain text, as the tokens that an answer goes on behind; and
whole conversations for training, as a release's chat template writes them.

Two forms: the one that this trainer writes conversations in (`TrainingForm`), and that of a released model, whose
tokenizer and chat template came with its weights (`ReleasedForm`).
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmjax.config import AudioConfig, DataConfig, VisionConfig
from mmjax.data.align import Document, PlacedPicture, align, place, read_patches, read_spectrograms
from mmjax.data.batch import Batch
from mmjax.data.chat_template import ChatTemplate, TemplateProcess, read_chat_template, read_object, read_template_file
from mmjax.data.files import open_regular, reason
from mmjax.data.packing import PackedDocument, fill
from mmjax.data.sources.conversation import Message, Sample, Sound, VideoFile
from mmjax.data.sources.records import MAX_RECORD_BYTES, decode_record, file_reader
from mmjax.data.tokenizer import Tokenizer, encode_cut, read_tokenizer
from mmjax.errors import DataError

# Put into a control token that a text merely spells: no character, so no text loses anything by its removal.
_CUT = "\ufdd0"
# Stand around answers that a template marks: no characters either.
_MARKS = ("\ufdd1", "\ufdd2")
# Of Fuyu: ends each row of a picture's patches.
_NEWLINE_TOKEN = "|NEWLINE|"


class PromptForm(Protocol):
    """How a model is spoken to."""

    vocabulary_size: int
    """One more than the largest id that has a text."""
    pad_token_id: int
    stop_tokens: tuple[int, ...]
    """Tokens that end an answer."""

    def chats(self, samples: Sequence[Sample]) -> list[Document]:
        """Conversations up to where the assistant answers; a last answer is left out."""
        ...

    def text(self, text: str) -> Document:
        """A text that is to be continued."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, control tokens left out."""
        ...


class TrainingForm:
    """The form that `align` trains."""

    def __init__(self, tokenizer: Tokenizer, data: DataConfig, vision: VisionConfig, audio: AudioConfig | None = None):
        self._tokenizer, self._data, self._vision, self._audio = tokenizer, data, vision, audio
        self.vocabulary_size, self.pad_token_id = tokenizer.vocabulary_size, tokenizer.pad_token_id
        self.stop_tokens = (tokenizer.end_token_id,)

    def chats(self, samples: Sequence[Sample]) -> list[Document]:
        opened = Message(role="assistant", parts=(), is_supervised=False)
        documents = []
        for sample in samples:
            sample = dataclasses.replace(sample, messages=(*_questions(sample), opened))
            document = align(sample, self._tokenizer, self._data, self._vision, self._audio)
            documents.append(_document(document.where, document.tokens[: document.answer_start], document))
        return documents

    def text(self, text: str) -> Document:
        return _document("the text", self._tokenizer.encode(text))

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class ReleasedForm:
    """The form of a released model: a folder with tokenizer.json, and what else its release has of

    tokenizer_config.json, chat_template.jinja, generation_config.json, config.json
    """

    def __init__(
        self,
        folder: Path,
        data: DataConfig,
        vision: VisionConfig,
        template: ChatTemplate | None = None,
        *,
        is_trained: bool = False,
    ):
        """`template` in place of the folder's own. `is_trained`: what is spoken to has learned from `conversation`, so
        prompts have no date either, and `data.end_token` ends an answer whatever the release says.

        Raises:
          DataError: a file cannot be used.
        """
        self._folder, self._data, self._vision, self._is_trained = folder, data, vision, is_trained
        if not (folder / "tokenizer.json").exists():
            there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no folder"
            raise DataError(
                str(folder / "tokenizer.json"),
                found=f"no such file (there: {there or 'nothing'})",
                expected="the tokenizer that the model was trained with",
                remedy="put it there, or give --tokenizer FOLDER",
            )
        self._tokenizer, _ = read_tokenizer(folder / "tokenizer.json")
        self._template = template or read_chat_template(folder)
        self._settings = read_object(folder / "tokenizer_config.json")
        config, generation = (read_object(folder / name) for name in ("config.json", "generation_config.json"))
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values())
        self._special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        # Between the first character of a control token and its rest.
        self._cuts = re.compile(
            "|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self._special if len(text) > 1)
            or "(?!)"
        )
        self.stop_tokens = self._stops(config, generation)
        self.pad_token_id = self.stop_tokens[0] if self.stop_tokens else 0
        names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
        self._image_token = next(
            (config[name] for name in names if isinstance(config.get(name), int)),
            self._tokenizer.token_to_id(data.image_token) if data.image_token else None,
        )
        # For training: marks what the assistant generates, and knows no date, which would change a batch by the day.
        self._trained = TemplateProcess(self._template, marks=_MARKS, has_clock=False) if self._template else None
        self._newline_token = self._tokenizer.token_to_id(_NEWLINE_TOKEN)

    def _stops(self, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
        """What any of the files calls the end of an answer."""
        text_config = config.get("text_config")
        stops: list[int] = []
        for values in (generation, config, text_config if isinstance(text_config, dict) else {}):
            declared = values.get("eos_token_id")
            stops += [token for token in (declared if isinstance(declared, list) else [declared]) if token is not None]
        ends = (
            self._id_of("eos_token"),
            self._tokenizer.token_to_id(self._data.end_token) if self._is_trained else None,
        )
        stops += [token for token in ends if token is not None]
        if wrong := [token for token in stops if not isinstance(token, int) or not 0 <= token < self.vocabulary_size]:
            raise DataError(
                str(self._folder),
                found=f"eos_token_id {wrong[0]!r}",
                expected=f"a token of the tokenizer, below {self.vocabulary_size}",
                remedy="correct generation_config.json and config.json",
            )
        return tuple(dict.fromkeys(stops))

    def _id_of(self, name: str) -> int | None:
        """Of the special token that the settings name so."""
        token = self._settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def chats(self, samples: Sequence[Sample]) -> list[Document]:
        template = self._with_template()
        samples = [dataclasses.replace(sample, messages=_questions(sample)) for sample in samples]
        pictures = [[place(picture, s.where, self._data, self._vision) for picture in s.pictures] for s in samples]
        messages = [[self._plain(message, sample.where) for message in sample.messages] for sample in samples]
        texts = template.render(messages, has_clock=not self._is_trained)
        return [
            self._with_pictures(sample.where, self._encode(text), placed)
            for sample, text, placed in zip(samples, texts, pictures, strict=True)
        ]

    @property
    def digest(self) -> str:
        """Of the template."""
        if self._template is None:
            return ""
        return hashlib.sha256(f"{self._template.text}{sorted(self._template.tokens.items())}".encode()).hexdigest()

    def conversation(self, sample: Sample) -> Document:
        """A whole conversation to be learned from, in the words of the template, without its clock.

        Answers are what the template marks by `{% generation %}`; without such marks, what a message of the assistant
        adds to the text up to where it answers. They end with their last control token, which is learned too.

        Raises:
          DataError: the template does not tell the answers, or the sample cannot be written by it.
        """
        pictures = [place(picture, sample.where, self._data, self._vision) for picture in sample.pictures]
        messages = [self._plain(message, sample.where) for message in sample.messages]
        is_learned = [message.is_supervised for message in sample.messages if message.role == "assistant"]
        template = self._with_template()
        if re.search(r"{%-?\s*generation\b", template.text):
            pieces = self._marked(self._write(messages, sample.where), len(is_learned))
        else:
            pieces = self._told_apart(messages, sample.where)
        if len(pieces) != 2 * len(is_learned) + 1:
            raise template.refusal(
                f"{len(pieces) // 2} answers for {len(is_learned)} messages of the assistant in {sample.where}",
                "one for each",
                "mend the template's generation blocks",
            )
        tokens: list[int] = []
        supervised: list[bool] = []
        answer_start, before = 0, ""
        control = set(self._special.values())
        for number, piece in enumerate(pieces):
            added, before = self._encode_behind(before, piece), piece or before
            stop = 0
            if number % 2:
                answer_start = len(tokens)
                stop = next((place for place in range(len(added), 0, -1) if added[place - 1] in control), 0)
                if not stop:
                    raise template.refusal(
                        f"an answer that no control token ends, in {sample.where}: {piece[-40:]!r}",
                        "a token that says the answer is over",
                        "use the template of the release",
                    )
                if not is_learned[number // 2]:
                    stop = 0
            tokens += added
            supervised += [True] * stop + [False] * (len(added) - stop)
        if not answer_start:
            raise DataError(
                sample.where,
                found="an answer with nothing before it",
                expected="a message that it answers",
                remedy="add one, or remove the record",
            )
        return self._with_pictures(sample.where, tokens, pictures, supervised, answer_start)

    def _with_template(self) -> ChatTemplate:
        if self._template is None:
            raise DataError(
                str(self._folder),
                found="no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                remedy="give --chat-template FILE, or continue plain text with --style text",
            )
        return self._template

    def _write(self, messages: list[dict[str, Any]], where: str, *, is_open: bool = False) -> str:
        assert self._trained is not None
        return self._trained.render(messages, name=where, add_generation_prompt=is_open)

    def _marked(self, text: str, num_answers: int) -> list[str]:
        """What stands before, in, between and behind the marked answers."""
        order = "".join(re.findall("|".join(_MARKS), text))
        if order != "".join(_MARKS) * (len(order) // 2):
            raise self._with_template().refusal("generation blocks inside each other", "one after the other", "mend it")
        return re.split("|".join(_MARKS), text)

    def _told_apart(self, messages: list[dict[str, Any]], where: str) -> list[str]:
        """The same of a template without marks."""
        whole, pieces, place = self._write(messages, where), [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            behind = self._write(messages[: number + 1], where)
            if number:
                before = self._write(messages[:number], where, is_open=True)
            else:
                # Templates need not take an empty conversation: how they open an answer shows behind the whole one.
                opened = self._write(messages, where, is_open=True).removeprefix(whole)
                before = behind[: behind.find(opened) + len(opened)] if opened in behind else ""
            if not (behind.startswith(before) and whole.startswith(behind) and len(before) >= place):
                raise self._with_template().refusal(
                    f"text that changes with the messages that follow it, at message {number + 1} of {where}",
                    "a template that only adds to what it wrote, or marks answers by {% generation %}",
                    "mark the answers in the template, or give each answer a record of its own",
                )
            pieces += [whole[place : len(before)], whole[len(before) : len(behind)]]
            place = len(behind)
        return [*pieces, whole[place:]]

    def _plain(self, message: Message, where: str) -> dict[str, Any]:
        """The message as templates know it; what its text merely spells is no control token."""
        if any(isinstance(part, Sound | VideoFile) for part in message.parts):
            raise DataError(
                where,
                found="a sound or a video",
                expected="text and pictures, for a released tokenizer and chat template",
                remedy="ask with text and pictures, or ask a run of this trainer",
            )
        if all(isinstance(part, str) for part in message.parts):
            return {"role": message.role, "content": self._cut("".join(map(str, message.parts)), where)}
        parts = [
            {"type": "text", "text": self._cut(part, where)} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]
        return {"role": message.role, "content": parts}

    def _cut(self, text: str, where: str) -> str:
        cut = self._cuts.sub(_CUT, re.sub("|".join((_CUT, *_MARKS)), "", text))
        control = set(self._special.values())
        if not control.isdisjoint(self._encode(cut)):
            raise DataError(
                where,
                found="ordinary text that becomes a control token",
                expected="text that the tokenizer takes for text",
                remedy="remove the token's text from the message",
            )
        return cut

    def _encode(self, text: str) -> list[int]:
        """Ids of marked text: control tokens are those that no cut goes through."""
        return encode_cut(self._tokenizer, text.split(_CUT))

    def _encode_behind(self, before: str, text: str) -> list[int]:
        """Ids of marked text that goes on behind another: a tokenizer may put a space before what begins a text."""
        known, whole = self._encode(before), self._encode(before + text)
        return whole[len(known) :] if whole[: len(known)] == known else self._encode(text)

    def _with_pictures(
        self,
        where: str,
        tokens: list[int],
        pictures: list[PlacedPicture],
        supervised: list[bool] | None = None,
        answer_start: int | None = None,
    ) -> Document:
        """One placeholder a picture becomes as many as it has features."""
        supervised = [False] * len(tokens) if supervised is None else supervised
        answer_start = len(tokens) if answer_start is None else answer_start
        found = tokens.count(self._image_token) if self._image_token is not None else 0
        if found != len(pictures) and pictures:
            raise DataError(
                where,
                found=f"{found} image tokens for {len(pictures)} pictures in what the chat template writes",
                expected="one for each picture",
                remedy="use the template and config.json of this model's release",
            )
        longer: list[int] = []
        is_feature: list[bool] = []
        is_supervised: list[bool] = []
        rest, start = iter(pictures), 0
        for number, (token, is_learned) in enumerate(zip(tokens, supervised, strict=True)):
            start = len(longer) if number == answer_start else start
            is_picture = bool(pictures) and token == self._image_token
            taken = next(rest).tokens(token, self._newline_token, where) if is_picture else [token]
            longer += taken
            is_feature += [is_picture] * len(taken)
            is_supervised += [is_learned and not is_picture] * len(taken)
        return dataclasses.replace(
            _document(where, longer),
            is_supervised=np.array(is_supervised),
            is_feature=np.array(is_feature),
            pictures=tuple(pictures),
            answer_start=len(longer) if answer_start == len(tokens) else start,
        )

    def text(self, text: str) -> Document:
        # As transformers does: markup in a text to be continued is markup.
        begins = self._settings.get("add_bos_token")
        tokens = self._tokenizer.encode(text, add_special_tokens=begins is not False).ids
        bos = self._id_of("bos_token")
        if begins and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return _document("the text", tokens)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def trained_form(data: DataConfig, vision: VisionConfig) -> ReleasedForm | None:
    """The form that a run's conversations are written in, if `data.chat_template` asks for one.

    Raises:
      DataError: a file cannot be used.
    """
    if not data.chat_template:
        return None
    folder, path = Path(data.tokenizer).parent, Path(data.chat_template)
    template = read_chat_template(path) if path.is_dir() else read_template_file(path, folder)
    if template is None:
        raise DataError(
            f"{path}, data.chat_template",
            found="a folder without a chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            remedy="name the template's file",
        )
    return ReleasedForm(folder, data, vision, template, is_trained=True)


def _questions(sample: Sample) -> tuple[Message, ...]:
    """The messages without a last answer."""
    messages = sample.messages
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(
            sample.where, found="no question", expected="a message of the user", remedy="add one, or remove the record"
        )
    return messages


def _document(where: str, tokens: Sequence[int] | np.ndarray, pictured: Document | None = None) -> Document:
    length = len(tokens)
    if not length:
        raise DataError(where, found="no token", expected="a prompt of at least one token", remedy="write a prompt")
    return Document(
        where=where,
        tokens=np.asarray(tokens, np.int32),
        is_supervised=np.zeros(length, bool),
        is_feature=np.zeros(length, bool) if pictured is None else pictured.is_feature[:length],
        pictures=() if pictured is None else pictured.pictures,
        is_sound=np.zeros(length, bool) if pictured is None else pictured.is_sound[:length],
        sounds=() if pictured is None else pictured.sounds,
        answer_start=length,
    )


def read_conversations(path: Path) -> list[Sample]:
    """The conversations of a JSONL, one a line; paths of media are relative to its folder, and stay inside it.

    Raises:
      DataError: the file or a record cannot be used.
    """
    samples = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES + 1), b""), 1):
                where = f"{path}, line {number}"
                if len(line) > MAX_RECORD_BYTES:
                    raise DataError(
                        where,
                        found=f"more than {MAX_RECORD_BYTES:,} bytes",
                        expected="one conversation a line",
                        remedy="check for missing line ends",
                    )
                if not line.isspace():
                    samples.append(_conversation(line, where, path.parent))
    except OSError as error:
        raise DataError(
            str(path), found=reason(error), expected="a JSONL of conversations", remedy="check the path"
        ) from error
    if not samples:
        raise DataError(str(path), found="no record", expected="one conversation a line", remedy="check the file")
    return samples


def _conversation(line: bytes, where: str, root: Path) -> Sample:
    return file_reader(where, root).read(decode_record(line, where), needs_answer=False)


def bucket(size: int, smallest: int = 16) -> int:
    """The least power of two that holds `size`, so that few sizes are ever compiled; 0 stays 0."""
    return max(smallest, 1 << (size - 1).bit_length()) if size else 0


def prompt_batch(
    documents: Sequence[Document],
    rows: int,
    data: DataConfig,
    vision: VisionConfig,
    pad_token_id: int,
    audio: AudioConfig | None = None,
) -> Batch:
    """One row a prompt, and rows of padding up to `rows`; positions, patches and clips have room for a power of two."""
    sizes = dataclasses.replace(
        data,
        rows=rows,
        row_tokens=bucket(max(len(document.tokens) for document in documents)),
        row_patches=bucket(max(document.num_patches for document in documents)),
        row_clips=bucket(max(document.num_clips for document in documents), smallest=1),
        images="keep",
        sounds="keep",
    )

    def read(document: Document) -> PackedDocument:
        spectrograms = None if audio is None else read_spectrograms(document, sizes, audio)
        return PackedDocument(document, read_patches(document, sizes, vision), spectrograms)

    return fill([[read(document)] for document in documents], sizes, vision, pad_token_id, audio=audio)
