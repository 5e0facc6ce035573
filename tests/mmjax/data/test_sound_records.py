"""Sounds from a record to a batch: placeholders, clips, rows, what is left out, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import AudioConfig, DataConfig, ModelConfig, RunConfig, VisionConfig
from mmjax.data.align import align, fit
from mmjax.data.loader import Loader
from mmjax.data.packing import Room, pack
from mmjax.data.sources.conversation import SoundFile
from mmjax.data.sources.records import file_reader
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.errors import DataError
from mmjax.planner.memory import row_bytes

soundfile = pytest.importorskip("soundfile")
sounds = pytest.importorskip("mmjax.data.sounds")

# A clip is 0.2 s of sound and gives two features.
AUDIO = AudioConfig(
    num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=8, mel_bins=6, clip_frames=20, projector_width=8
)
MODEL = ModelConfig(vision=VisionConfig(num_layers=0), audio=AUDIO)
DATA = DataConfig(rows=2, row_tokens=64, row_patches=0, row_clips=4, balance_rows=1)


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for name, seconds, rate in (("a.wav", 0.15, 16_000), ("b.flac", 0.5, 8_000), ("c.ogg", 0.2, 44_100)):
        soundfile.write(tmp_path / name, 0.2 * random.normal(size=round(rate * seconds)), rate)
    return tmp_path


def record(*names: str, answer: str = "yes") -> dict:
    question = {"role": "user", "content": "<audio>" * len(names) + "?"}
    return {"messages": [question, {"role": "assistant", "content": answer}], "audios": list(names)}


def write(folder: Path, *records: dict) -> str:
    (folder / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "d.jsonl")


def load(folder: Path, *records: dict, data: DataConfig = DATA, model: ModelConfig = MODEL, **settings) -> Loader:
    given = {"source": write(folder, *records), **settings}
    return Loader(DataConfig(**{**vars(data), **given}), model.vision, 0, model=model, say=lambda _: None)


def document(folder: Path, record: dict, data: DataConfig = DATA):
    sample = file_reader("here", folder).read(record)
    return align(sample, ByteTokenizer(), data, MODEL.vision, AUDIO)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "audio"}, {"type": "text", "text": "<audio>"}],
        [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "<audio>"}],
        [{"type": "audio", "path": "a.wav"}, {"type": "text", "text": "<audio>"}],
        "<audio>",
    ],
)
def test_every_way_to_name_a_sound_is_read_and_text_that_spells_one_is_text(content, folder):
    takes_entry = content == "<audio>" or content[0] == {"type": "audio"}
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    sample = file_reader("here", folder).read({"messages": messages} | ({"audio": "a.wav"} if takes_entry else {}))
    named = [part for part in sample.messages[0].parts if isinstance(part, SoundFile)]
    assert [(sound.path, sound.root) for sound in named] == [("a.wav", folder)]
    assert ("<audio>" in sample.messages[0].parts) == (content != "<audio>")


def test_a_marker_without_its_sound_and_a_sound_without_its_marker_are_refused(folder):
    for names, markers in ((["a.wav"], 2), (["a.wav", "c.ogg"], 1)):
        messages = [{"role": "user", "content": "<audio>" * markers}, {"role": "assistant", "content": "x"}]
        with pytest.raises(DataError, match=f"{markers} audio markers and {len(names)} audios"):
            file_reader("here", folder).read({"messages": messages, "audios": names})
    plain = file_reader("here", folder).read({"messages": [{"role": "assistant", "content": "<audio>"}]})
    assert plain.messages[0].parts == ("<audio>",)


def test_a_batch_holds_the_clips_of_each_sound_where_its_tokens_stand(folder):
    loader = load(folder, record("b.flac", "a.wav"), record("c.ogg"), record())
    batch = loader.batch(0)
    assert batch.spectrograms.shape == (2, 4, 20, 6) and (batch.feature_index == -1).all()
    seen = 0
    for row, numbers in enumerate(loader.planned_rows(0)):
        clip = token = 0
        for number in numbers:
            opened = loader._mixture.sources[0][number]
            heard = [part for part in opened.messages[0].parts if isinstance(part, SoundFile)]
            taken = document(folder, record(*(sound.path for sound in heard)))
            here = slice(token, token + len(taken.tokens))
            expected = []
            for sound in heard:
                samples = sounds.read_sound(sound, 10.0)
                clips, shape = sounds.clips(samples, AUDIO), sounds.shape_of(len(samples), AUDIO)
                np.testing.assert_array_equal(batch.spectrograms[row, clip : clip + len(clips)], clips)
                expected += range(2 * clip, 2 * clip + shape.num_features)
                clip += len(clips)
            index = batch.sound_index[row, here]
            assert index[index >= 0].tolist() == expected
            assert (batch.tokens[row, here][index >= 0] == ByteTokenizer.audio_token_id).all()
            assert not batch.loss_weight[row, here][:-1][index[1:] >= 0].any()
            token, seen = here.stop, seen + len(heard)
        assert (batch.spectrograms[row, clip:] == -1.5).all() and (batch.sound_index[row, token:] == -1).all()
    # 0.5 s are three clips, of the last of which one feature holds sound.
    assert seen >= 3 and document(folder, record("b.flac")).sounds[0].num_features == 5
    blank = load(folder, record("b.flac", "a.wav"), record("c.ogg"), record(), sounds="blank").batch(0)
    assert (blank.spectrograms == -1.5).all() and np.array_equal(blank.sound_index, batch.sound_index)


def test_rows_hold_no_more_clips_than_their_room():
    random = np.random.default_rng(0)
    tokens, clips = random.integers(4, 30, 400), random.integers(0, 4, 400)
    nothing = np.zeros_like(tokens)
    rows = pack(tokens, nothing, tokens, clips, room=Room(tokens=64, patches=0, image_patches=0, clips=5), window=64)
    assert sorted(number for row in rows for number in row) == list(range(400))
    assert all(tokens[row].sum() <= 64 and clips[row].sum() <= 5 for row in rows)
    assert max(clips[row].sum() for row in rows) == 5


def test_a_sample_with_too_much_sound_is_refused_dropped_or_cut_between_sounds(folder):
    long = record("b.flac", "b.flac", answer="y" * 9)
    with pytest.raises(DataError, match="6 clips of sound"):
        load(folder, long, record("a.wav"))
    assert load(folder, long, record("a.wav"), too_long="drop").counters()["dropped"] == 1
    data = DataConfig(**{**vars(DATA), "too_long": "truncate"})
    turns = record("b.flac")["messages"] + record("b.flac")["messages"]
    whole = document(folder, {"messages": turns, "audios": ["b.flac", "b.flac"]}, data)
    cut, outcome = fit(whole, data)
    assert outcome == "cut" and cut is not None and len(cut.sounds) == 1 and cut.is_sound.sum() == 5
    assert len(cut.tokens) == whole.sound_spans()[1].start == len(cut.is_supervised) == len(cut.is_feature)


def test_sounds_are_refused_by_a_model_that_hears_none_and_damaged_ones_go_into_quarantine(folder):
    deaf = ModelConfig(vision=VisionConfig(num_layers=0))
    with pytest.raises(DataError, match=r"model\.audio\.num_layers is 0"):
        load(folder, record("a.wav"), model=deaf)
    (folder / "bad.wav").write_bytes(b"RIFF no sound")
    with pytest.raises(DataError, match=r"line 1, sound 'bad\.wav'"):
        load(folder, record("bad.wav"), record("a.wav"))
    skipping = load(folder, record("bad.wav"), record("a.wav"), bad_sample="skip", max_bad_samples=1)
    assert [entry.where for entry in skipping.rejected] == [f"{folder}/d.jsonl, line 1, sound 'bad.wav'"]
    with pytest.raises(DataError, match=r"more than 0\.1 seconds"):
        load(folder, record("a.wav"), sound_max_seconds=0.1)


def test_a_sound_that_changes_its_length_while_the_run_goes_on_stops_it(folder):
    loader = load(folder, record("a.wav"))
    shutil.copy(folder / "b.flac", folder / "a.wav")
    with pytest.raises(DataError, match="another size than when it was measured"):
        loader.batch(0)


def test_the_planner_counts_the_bytes_of_a_row(folder):
    batch = load(folder, record("a.wav")).batch(0)
    assert row_bytes(RunConfig(model=MODEL, data=DATA)) == sum(array[0].nbytes for array in batch)


def test_held_out_sounds_are_shown_by_their_spectrograms(folder):
    write(folder, record("a.wav"), record())
    data = DataConfig(**{**vars(DATA), "eval_source": str(folder / "d.jsonl")})
    questions = Loader(data, MODEL.vision, 0, "held_out", model=MODEL, say=lambda _: None).evaluation()
    heard, silent = questions.batches()[0].answers
    assert silent.picture is None and heard.picture is not None
    assert heard.picture.shape == (6, 20, 1) and {heard.picture.min(), heard.picture.max()} == {0, 255}
