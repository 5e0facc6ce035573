import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_digits

from mmjax.config import DataConfig, VisionConfig
from mmjax.data.batch import digest, fill_rate, supervised_tokens
from mmjax.data.evaluation import majority_baseline
from mmjax.data.loader import Loader, check_fingerprint
from mmjax.data.measure import PIPELINE_VERSION
from mmjax.data.sources import digits
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.errors import DataError

VISION = VisionConfig(patch_pixels=4)
SMALL = DataConfig(rows=2, row_tokens=64, row_patches=64, packing_window=4)
BYTES = ByteTokenizer()


def load(source: str, split="train", vision=VISION, seed=0, folder: Path | None = None, **changes) -> Loader:
    settings = {"source": source, "eval_source": source} | changes
    return Loader(dataclasses.replace(SMALL, **settings), vision, seed, split, folder=folder)


def documents(batch):
    """(row, slice, text) of every document."""
    for row, segments in enumerate(batch.segment_ids):
        for segment in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == segment)
            here = slice(places[0], places[-1] + 1)
            assert len(places) == here.stop - here.start
            yield row, here, BYTES.decode(batch.tokens[row, here].tolist())


@pytest.fixture
def mixed(write_records, write_image, chat):
    """Twelve samples of 0, 1, 3, 2 pictures, each picture of its own colour; the question's number names the sample."""
    colours, records = {}, []
    for number, count in enumerate([0, 1, 3, 2] * 3):
        sizes = [(8, 8), (16, 8), (8, 24)]
        colours[number] = [(10 * number, 60 * picture, 77) for picture in range(count)]
        names = [
            write_image(f"{number}-{picture}.png", colour, sizes[picture])
            for picture, colour in enumerate(colours[number])
        ]
        records.append(chat(f"{'<image>' * count}q{number};", "a", *names))
    return write_records(*records), colours


def test_batches_are_the_same_in_any_order_in_another_loader_and_when_iterated(mixed):
    path, _ = mixed
    first, second = load(path), load(path)
    expected = [digest(first.batch(step)) for step in range(9)]
    assert len(set(expected)) > 5
    assert [digest(second.batch(step)) for step in reversed(range(9))] == expected[::-1]
    for ahead in (0, 1, 3):
        iterated = load(path, prefetch_batches=ahead).iterate(4)
        assert [digest(batch) for batch in itertools.islice(iterated, 5)] == expected[4:]
    assert digest(load(path, seed=1).batch(0)) != expected[0]


def test_batches_are_the_same_in_another_process(mixed):
    code = (
        "import sys; from mmjax.config import DataConfig, VisionConfig; from mmjax.data.batch import digest; "
        "from mmjax.data.loader import Loader; "
        "data = DataConfig(source=sys.argv[1], rows=2, row_tokens=64, row_patches=64, packing_window=4); "
        "print(digest(Loader(data, VisionConfig(patch_pixels=4), 0).batch(7)))"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code, mixed[0]], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == digest(load(mixed[0]).batch(7))


def test_batches_are_those_of_the_recorded_pipeline_version(monkeypatch):
    monkeypatch.setattr(digits, "EPOCH_SAMPLES", 256)
    # Raise PIPELINE_VERSION with any change to this value: resumed runs would see other batches.
    assert (PIPELINE_VERSION, digest(load("digits").batch(7))[:16]) == (5, "7321090d24bb4662")


@pytest.mark.parametrize("window", [1, 4, 5, 100])
def test_every_epoch_holds_every_sample_once_also_over_batches_that_straddle_its_edge(mixed, window):
    path, _ = mixed
    loader = load(path, packing_window=window, rows=5)
    texts = (text for step in range(40) for _, _, text in documents(loader.batch(step)))
    epochs = [sorted(itertools.islice(texts, 12)) for _ in range(4)]
    assert epochs == [sorted(f"q{number};a" for number in range(12))] * 4
    rows = [len(loader._plan.chapter(epoch)) for epoch in range(4)]
    assert any(count % 5 for count in itertools.accumulate(rows))


def test_epochs_have_different_orders(mixed):
    plan = load(mixed[0])._plan
    orders = [tuple(itertools.chain(*plan.chapter(epoch))) for epoch in range(3)]
    assert len(set(orders)) == 3


def test_each_placeholder_gets_the_patches_of_its_own_picture(mixed):
    path, colours = mixed
    loader = load(path)
    seen = set()
    for step in range(12):
        batch = loader.batch(step)
        for row, here, text in documents(batch):
            number = int(text[1 : text.index(";")])
            seen.add(number)
            features = batch.feature_index[row, here]
            features = features[features >= 0]
            assert np.all(np.diff(features) == 1)
            expected = [colour for colour, count in zip(colours[number], (1, 2, 3), strict=False) for _ in range(count)]
            assert len(features) == len(expected)
            images = set()
            for feature, colour in zip(features, expected, strict=True):
                group = slice(4 * feature, 4 * feature + 4)
                assert batch.patch_feature[row, feature] == feature
                pixels = (batch.patches[row, group].reshape(4, 3, 16) + 1) * 127.5
                np.testing.assert_allclose(
                    pixels, np.array(colour, np.float32)[None, :, None].repeat(4, 0).repeat(16, 2)
                )
                assert len(set(batch.patch_segment_ids[row, group])) == 1
                images.add(batch.patch_segment_ids[row, group][0])
                low = batch.patch_position[row, group.start]
                np.testing.assert_array_equal(
                    batch.patch_position[row, group] - low, [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
                )
            assert len(images) == len(colours[number])
            is_image = batch.tokens[row, here] == BYTES.image_token_id
            np.testing.assert_array_equal(is_image, batch.feature_index[row, here] >= 0)
        for row in range(2):
            count = (batch.feature_index[row] >= 0).sum()
            used = batch.patch_segment_ids[row] > 0
            assert used.sum() == 4 * count == 4 * (batch.patch_feature[row] >= 0).sum()
            for image in range(1, batch.patch_segment_ids[row].max() + 1):
                places = batch.patch_position[row][batch.patch_segment_ids[row] == image]
                grid = batch.patch_grid[row][batch.patch_segment_ids[row] == image]
                assert len({tuple(place) for place in places}) == len(places) == grid[0].prod()
                np.testing.assert_array_equal(places.max(0) + 1, grid[0])
            assert np.all(batch.patch_grid[row][~used] == 1)
    assert seen == set(range(12))


def test_targets_weights_and_positions_follow_the_documents(mixed):
    batch = load(mixed[0]).batch(0)
    for row, here, _ in documents(batch):
        np.testing.assert_array_equal(batch.targets[row, here][:-1], batch.tokens[row, here][1:])
        np.testing.assert_array_equal(batch.positions[row, here], np.arange(here.stop - here.start))
        assert batch.loss_weight[row, here.stop - 1] == 0
    assert np.all(batch.loss_weight[batch.segment_ids == 0] == 0)
    assert fill_rate(batch) == pytest.approx(np.mean(batch.segment_ids > 0))


@pytest.mark.parametrize("question", ["why?", "<image>why?", "why<image>?", "<image><image>"])
def test_supervised_tokens_are_those_of_the_answer_and_its_end(question, write_records, write_image, chat):
    names = [write_image("a.png", size=(16, 8))] * question.count("<image>")
    batch = load(write_records(chat(question, "so!", *names)), rows=1).batch(0)
    assert supervised_tokens(batch) == 4
    targets = batch.targets[batch.loss_weight > 0].tolist()
    assert targets == [*b"so!", BYTES.end_token_id]
    before = batch.tokens[batch.loss_weight > 0].tolist()
    assert before == [*BYTES.header("assistant"), *b"so!"]


def test_every_answer_of_a_conversation_is_supervised_but_those_of_weight_0(write_records):
    turns = [("system", "be brief"), ("user", "1"), ("assistant", "ab"), ("user", "2"), ("assistant", "cde")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert supervised_tokens(load(write_records({"messages": messages}), rows=1).batch(0)) == 3 + 4
    messages[2]["weight"] = 0
    loader = load(write_records({"messages": messages}), rows=1)
    assert supervised_tokens(loader.batch(0)) == 4 == loader.counters()["supervised_tokens"]


def test_text_that_spells_control_tokens_or_bytes_of_value_0_stays_content(write_records, chat):
    text = "\0\0<|end_of_msg|><|media_pad|>ÿ"
    batch = load(write_records(chat(text, text)), rows=1, row_tokens=128).batch(0)
    length = len(text.encode())
    assert (batch.segment_ids == 1).sum() == 2 * length + 4
    assert (batch.feature_index >= 0).sum() == 0
    assert supervised_tokens(batch) == length + 1
    assert (batch.tokens[batch.segment_ids == 1] == BYTES.end_token_id).sum() == 2


def test_a_sample_longer_than_a_row_is_named_or_dropped_and_never_cut(write_records, write_image, chat):
    name = write_image("a.png", size=(24, 16))
    path = write_records(chat("x<image>y", "zz", name), chat("x", "y"))
    # Two headers, two ends, x, y, zz and the six tokens of a 4 x 6 grid.
    length = 4 + 4 + 6
    for row_tokens, row_patches in itertools.product(range(6, length + 2), (20, 24)):
        settings = {"row_tokens": row_tokens, "row_patches": row_patches, "rows": 4}
        loader = load(path, too_long="drop", **settings)
        fits = row_tokens >= length and row_patches >= 24
        assert loader.num_dropped == (not fits)
        batch = loader.batch(0)
        assert (batch.tokens == BYTES.image_token_id).sum() == (batch.patch_feature >= 0).sum()
        assert ((batch.tokens == BYTES.image_token_id).sum() > 0) == fits
        if not fits:
            with pytest.raises(DataError, match=f"line 1: found a sample of {length} tokens and 24 patches"):
                load(path, **settings)
    with pytest.raises(DataError, match="0 skipped, 2 dropped"):
        load(path, too_long="drop", row_tokens=5)


def test_bad_samples_are_skipped_and_counted_and_an_error_when_none_is_left(write_records, write_image, chat, tmp_path):
    good = [chat(f"<image>q{number};", "a", write_image(f"{number}.png")) for number in range(3)]
    (tmp_path / "cut.png").write_bytes(make_cut_png())
    cut = chat("<image>cut", "a", "cut.png")
    path = write_records(good[0], b"{broken", good[1], chat("<image>", "a", "missing.png"), cut, good[2])
    with pytest.raises(DataError, match="line 2"):
        load(path)
    loader = load(path, bad_sample="skip")
    assert loader.num_skipped == 2
    texts = [text for step in range(6) for _, _, text in documents(loader.batch(step))]
    assert sorted(texts[:3]) == ["q0;a", "q1;a", "q2;a"] and "cut" not in "".join(texts)
    # The picture that is cut off is found out when it is decoded.
    assert loader.counters()["skipped"] == 3 and loader.fingerprint()["num_skipped"] == 2
    assert [digest(load(path, bad_sample="skip").batch(step)) for step in (3, 1)] == [
        digest(loader.batch(step)) for step in (3, 1)
    ]
    held_out = load(path, split="held_out", bad_sample="skip")
    assert sum(len(batch.answers) for batch in held_out.evaluation().batches()) == 3 == held_out.num_left_out
    with pytest.raises(DataError, match=r"2 skipped, 0 dropped.*first error was.*line 1"):
        load(write_records(b"{", b"["), bad_sample="skip")
    all_cut = load(write_records(cut), bad_sample="skip")
    with pytest.raises(DataError, match="no readable sample"):
        all_cut.batch(0)
    with pytest.raises(DataError, match="no readable sample"):
        load(write_records(cut), split="held_out", bad_sample="skip").evaluation().batches()


def make_cut_png() -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()[:500]


def test_an_error_in_a_prefetched_batch_reaches_the_caller_as_it_is(write_records, chat, tmp_path):
    (tmp_path / "cut.png").write_bytes(make_cut_png())
    loader = load(write_records(chat("<image>", "a", "cut.png")))
    with pytest.raises(DataError, match=r"line 1, image 'cut\.png'"):
        next(loader.iterate(0))


def test_a_picture_that_changes_its_size_is_refused_and_in_another_run_folder_measured_anew(
    write_records, write_image, chat, tmp_path
):
    file = write_records(chat("<image>", "a", write_image("a.png")))
    loaders = [load(file, folder=tmp_path / "run")]
    write_image("a.png", size=(32, 8))
    # The run's index keeps the old size, so that starting it again would not help.
    loaders.append(load(file, folder=tmp_path / "run"))
    for loader in loaders:
        with pytest.raises(DataError, match=r"line 1: .* give another --run-dir"):
            loader.batch(0)
    load(file, folder=tmp_path / "other").batch(0)


def test_pictures_for_a_model_without_a_tower_are_refused_and_text_has_no_patches(write_records, write_image, chat):
    text_model = VisionConfig(num_layers=0)
    with pytest.raises(DataError, match=r"model\.vision\.num_layers is 0"):
        load(write_records(chat("<image>", "a", write_image("a.png"))), vision=text_model)
    assert load(write_records(chat("q", "a")), vision=text_model).batch(0).patches.shape == (2, 0, 48)


def test_blank_pictures_are_grey_and_all_else_is_the_same(mixed):
    kept, blank = load(mixed[0]).batch(0), load(mixed[0], images="blank").batch(0)
    assert np.all(blank.patches == 0) and not np.all(kept.patches == 0)
    assert digest(kept._replace(patches=blank.patches)) == digest(blank)


def test_a_fingerprint_survives_json_and_every_difference_is_named(mixed, write_records, chat):
    saved = json.loads(json.dumps(load(mixed[0]).fingerprint()))
    check_fingerprint(saved, load(mixed[0]).fingerprint())
    changes = {"seed": {"seed": 1}, "row_tokens": {"row_tokens": 63}, "packing_window": {"packing_window": 3}}
    for field, change in changes.items():
        with pytest.raises(DataError, match=f"data of the checkpoint, {field}"):
            check_fingerprint(saved, load(mixed[0], **change).fingerprint())
    other_pixels = VisionConfig(**{**vars(VISION), "pixel_mean": (0.1, 0.2, 0.3)})
    with pytest.raises(DataError, match="pixel_mean"):
        check_fingerprint(saved, load(mixed[0], vision=other_pixels).fingerprint())
    with pytest.raises(DataError, match="source_digest"):
        check_fingerprint(saved, load(write_records(chat("q", "a"))).fingerprint())
    with pytest.raises(DataError, match="patch_pixels"):
        check_fingerprint({name: value for name, value in saved.items() if name != "patch_pixels"}, saved)


def test_evaluation_rows_hold_the_answer_and_room_for_the_longest_one(write_records, write_image, chat):
    name = write_image("a.png", (9, 8, 7), (16, 8))
    records = [chat("<image>first?", "a", name), chat("second?", "long one"), chat("third?", "abc")]
    records[2]["messages"] += [{"role": "user", "content": "<image>never read"}, {"role": "user", "content": "x"}]
    records[2]["images"] = [name]
    batches = load(write_records(*records), split="held_out", rows=1).evaluation().batches()
    found = {answer.question: (batch.batch, answer) for batch in batches for answer in batch.answers}
    assert list(found) == ["first?", "second?", "third?"]
    assert {name: answer.reference for name, (_, answer) in found.items()} == {
        "first?": "a", "second?": "long one", "third?": "abc"
    }  # fmt: skip
    for batch, answer in found.values():
        assert answer.budget == len("long one") + 1
        room = slice(answer.start, answer.start + answer.budget)
        reference = [*answer.reference.encode(), BYTES.end_token_id]
        padding = [BYTES.pad_token_id] * (answer.budget - len(reference))
        assert batch.tokens[answer.row, room].tolist() == reference + padding
        assert len(set(batch.segment_ids[answer.row, answer.start - 1 : room.stop])) == 1
        assert batch.segment_ids[answer.row, answer.start] > 0
        # Where a token is predicted lies one before where it stands.
        weights = batch.loss_weight[answer.row, answer.start - 1 : room.stop]
        assert weights.tolist() == [1.0] * len(reference) + [0.0] * (answer.budget + 1 - len(reference))
    assert found["first?"][1].picture.shape == (8, 16, 3) and found["first?"][1].picture[0, 0].tolist() == [9, 8, 7]
    assert found["second?"][1].picture is None
    assert sum((batch.batch.feature_index >= 0).sum() for batch in batches) == 2


def test_an_answer_gets_what_room_a_row_has(write_records, chat):
    path = write_records(chat("q" * 50, "a"), chat("q", "b" * 30))
    answers = [answer for batch in load(path, split="held_out").evaluation().batches() for answer in batch.answers]
    assert [answer.budget for answer in answers] == [64 - 53, 31]


def test_held_out_digits_are_never_trained_on_and_answers_are_right():
    train, held_out = digits.Digits(0, "train"), digits.Digits(0, "held_out")
    images, all_labels = load_digits(return_X_y=True)
    scaled = np.round(images * (255 / 16)).astype(np.uint8)
    label_of = {scaled[number].tobytes(): int(all_labels[number]) for number in train.digit_numbers}
    assert not set(train.digit_numbers) & set(held_out.digit_numbers)
    assert len(train.digit_numbers) + len(held_out.digit_numbers) == 1797
    held_out_cells = held_out._pictures[:1000].reshape(-1, 2, 8, 2, 8).swapaxes(2, 3).reshape(-1, 64)
    assert not label_of.keys() & {cell.tobytes() for cell in held_out_cells}
    assert train.digest != held_out.digest != digits.Digits(1, "held_out").digest
    kinds = set()
    for number in range(200):
        sample = train[number]
        kinds.add(sample.kind)
        (picture,) = sample.pictures
        cells = picture.reshape(2, 8, 2, 8).swapaxes(1, 2).reshape(4, 64)
        labels = [label_of[cell.tobytes()] for cell in cells]
        question, answer = (message.text for message in sample.messages)
        expected = {
            "read?": "".join(map(str, labels)),
            "largest?": str(max(labels)),
            "smallest?": str(min(labels)),
            "sum?": str(sum(labels)),
            "how many even?": str(sum(label % 2 == 0 for label in labels)),
            "top left?": str(labels[0]),
            "top right?": str(labels[1]),
            "bottom left?": str(labels[2]),
            "bottom right?": str(labels[3]),
        }
        assert answer == expected[question]
    assert kinds == set(digits.KINDS)


def test_the_majority_guess_is_the_share_of_the_commonest_answer_of_each_kind():
    loader = Loader(dataclasses.replace(SMALL, eval_samples=60), VISION, 0, "held_out")
    answers = [answer for batch in loader.evaluation().batches() for answer in batch.answers]
    assert len(answers) == 60
    scores = majority_baseline(answers)
    hits = 0
    for kind in digits.KINDS:
        references = [answer.reference for answer in answers if answer.kind == kind]
        best = max(references.count(reference) for reference in references)
        assert scores[kind] == pytest.approx(best / len(references))
        hits += best
    assert scores["all"] == pytest.approx(hits / 60)
    assert majority_baseline([]) == {}


def test_making_a_loader_changes_no_file(mixed, tmp_path):
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in os.listdir(tmp_path)}
    load(mixed[0]).batch(0)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in os.listdir(tmp_path)} == before
