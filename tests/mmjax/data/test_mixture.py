"""Several sources, bad records, lost files and kept indices, as the loader sees them."""

import dataclasses
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.data.batch import Batch, digest
from mmjax.data.files import LostFileError
from mmjax.data.loader import Loader, check_fingerprint, patch_sizes
from mmjax.data.microbatch import BufferPool
from mmjax.data.sources.mixture import parse_names, whole_weights
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.errors import ConfigurationError, DataError

SMALL = DataConfig(rows=8, row_tokens=64, row_patches=64, image_max_patches=64, packing_window=4, max_bad_samples=5)
MODEL = ModelConfig(num_layers=4, full_attention_layers=(3,))


def load(source: str, folder: Path | None = None, **changes) -> Loader:
    options = {name: changes.pop(name) for name in ("num_hosts", "say") if name in changes}
    data = dataclasses.replace(SMALL, source=source, **changes)
    return Loader(data, VisionConfig(patch_pixels=4), 0, model=MODEL, folder=folder, **options)


def texts(batch: Batch) -> list[str]:
    return [
        ByteTokenizer().decode(tokens[segments == segment].tolist())
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True)
        for segment in range(1, segments.max() + 1)
    ]


@pytest.fixture
def three(tmp_path: Path) -> Callable[[], str]:
    """Three files of 40, 10 and 5 records, of text, of one picture each, and of both."""

    def write() -> str:
        for name, count, images in (("a", 40, 0), ("b", 10, 1), ("c", 5, 2)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            lines = []
            for number in range(count):
                names = [f"{number}-{picture}.png" for picture in range(images)]
                for path in names:
                    PIL.Image.fromarray(np.full((8, 16, 3), number, np.uint8)).save(folder / path)
                turns = [{"from": "human", "value": "<image>" * images + f"{name}{number}:"}]
                turns.append({"from": "gpt", "value": "x" * (number % 7 + 1)})
                lines.append(json.dumps({"conversations": turns, "images": names}) + "\n")
            (folder / "d.jsonl").write_text("".join(lines))
        return ";".join(str(tmp_path / name / "d.jsonl") for name in "abc")

    return write


def test_names_of_sources_with_parts_and_weights():
    names = parse_names("a b.jsonl#500,0.7; /x,y/c.parquet,2 ;d#3#4,1", "source")
    assert [(name.path, name.num_samples, str(name.weight)) for name in names] == [
        ("a b.jsonl", 500, "7/10"), ("/x,y/c.parquet", None, "2"), ("d#3", 4, "1")
    ]  # fmt: skip
    assert whole_weights(names) == [7, 20, 10] and whole_weights(parse_names("a;b", "source")) is None
    for text in ("a,1;b", "a,0;b,1", "a;a", "a,1;a#3,2", "a,0.0000001;b,1"):
        with pytest.raises(ConfigurationError, match=r"data\.source"):
            whole_weights(parse_names(text, "source"))


def test_a_mixture_without_weights_holds_every_sample_once_an_epoch(three):
    loader = load(three())
    seen = Counter()
    step = 0
    while sum(seen.values()) < 3 * 55:
        seen.update(texts(loader.batch(step)))
        step += 1
    assert len(seen) == 55 and set(seen.values()) <= {3, 4}


def test_weights_are_kept_and_parts_are_drawn_by_the_seed(three):
    a, b, c = three().split(";")
    loader = load(f"{a}#8,1;{b},2;{c},1")
    seen = Counter(text for step in range(30) for text in texts(loader.batch(step)))
    by_source = Counter()
    for text, count in seen.items():
        by_source[text[0]] += count
    total = sum(by_source.values())
    assert [by_source[name] / total for name in "abc"] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    chosen = sorted(text for text in seen if text[0] == "a")
    assert len(chosen) == 8 and chosen != sorted(chosen, key=lambda text: int(text[1 : text.index(":")]))[:8]
    assert chosen == sorted(
        text for text in Counter(t for s in range(30) for t in texts(load(f"{a}#8,1;{b},1").batch(s))) if text[0] == "a"
    )
    with pytest.raises(ConfigurationError, match="of a source with 5 samples"):
        load(f"{c}#6")


def test_batches_of_any_number_of_hosts_and_threads_are_parts_of_the_same_batch(three):
    source = three()
    expected = [load(source).batch(step) for step in range(6)]
    for hosts in (1, 2, 4, 8):
        loaders = [load(source, prefetch_batches=hosts) for _ in range(hosts)]
        rows = [range(host * 8 // hosts, (host + 1) * 8 // hosts) for host in range(hosts)]
        streams = [loader.iterate(2, rows=part) for loader, part in zip(loaders, rows, strict=True)]
        for step in range(2, 6):
            parts = [next(stream) for stream in streams]
            whole = Batch(
                *(
                    np.concatenate([array[part.start : part.stop] for array, part in zip(arrays, rows, strict=True)])
                    for arrays in zip(*parts, strict=True)
                )
            )
            assert digest(whole) == digest(expected[step])
            others = [(part.segment_ids > 0).any(axis=1).sum() for part in parts]
            assert sum(others) <= 8


def test_a_picture_that_fails_on_the_host_that_reads_it_alone_leaves_every_host_its_part_of_the_same_batch(three):
    source = three()
    for path in Path(source.split(";")[1]).parent.glob("[3-6]-0.png"):
        path.write_bytes(path.read_bytes()[:-25])
    whole = load(source, bad_sample="skip")
    hosts = [load(source, bad_sample="skip", num_hosts=2) for _ in range(2)]
    for step in range(6):
        expected = whole.batch(step)
        parts = [loader.batch(step, rows=range(4 * host, 4 * host + 4)) for host, loader in enumerate(hosts)]
        for arrays in zip(expected, *parts, strict=True):
            np.testing.assert_array_equal(arrays[0], np.concatenate([arrays[1][:4], arrays[2][4:]]))
    rejected = [{record.index for record in loader.rejected} for loader in (whole, *hosts)]
    # Each host knows of those that it read; together they are those that one host alone finds.
    assert rejected[0] == rejected[1] | rejected[2] and rejected[1] and rejected[2]


def test_memory_of_a_pool_gives_the_same_batches(three):
    loader, pool = load(three()), BufferPool()
    stream = loader.iterate(0, pool=pool)
    for step in range(12):
        batch = next(stream)
        assert digest(batch) == digest(loader.batch(step))
        pool.release(batch)
    assert pool.report().num_reused > 60


def test_a_resumed_loader_packs_nothing_that_lies_before_and_goes_on_with_the_same_batches(three, monkeypatch):
    monkeypatch.setattr("mmjax.data.loader.MIN_CHAPTER_SAMPLES", 16)
    source = three()
    first = load(source)
    counters = first.counters()
    for step in (0, 3, 400):
        expected = digest(first.batch(step))
        resumed = load(source)
        resumed.resume(json.loads(json.dumps(first.position(step))))
        # As a run prints them when it goes on.
        assert resumed.counters() == counters
        assert digest(resumed.batch(step)) == expected
        assert resumed._plan.num_packed <= 4
    assert first._plan.num_packed > 100


def test_the_index_is_made_once_and_again_when_the_file_changes(three, tmp_path, monkeypatch):
    source, run = three(), tmp_path / "run"
    expected = [digest(load(source).batch(step)) for step in range(3)]
    load(source, run)
    assert sorted(path.suffix for path in (run / "data_index").iterdir()) == [".json"] + [".npz"] * 6

    def unread(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("mmjax.data.measure.align", unread)
        patch.setattr("mmjax.data.sources.jsonl._index", unread)
        again = load(source, run)
        fingerprint = again.fingerprint()
    assert [digest(again.batch(step)) for step in range(3)] == expected
    check_fingerprint(fingerprint, load(source).fingerprint())
    for path in (run / "data_index").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:-200])
    assert load(source, run).fingerprint() == fingerprint
    path = Path(source.split(";")[1])
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"b3:", b"b_:"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = load(source, run).fingerprint()
    with pytest.raises(DataError, match="data of the checkpoint, source_2_digest"):
        check_fingerprint(fingerprint, changed)


def test_a_change_of_weights_or_of_the_model_s_costs_is_named(three):
    a, b, _ = three().split(";")
    saved = load(f"{a},1;{b},1").fingerprint()
    with pytest.raises(DataError, match="source_weights"):
        check_fingerprint(saved, load(f"{a},1;{b},2").fingerprint())
    data = dataclasses.replace(SMALL, source=f"{a},1;{b},1")
    other = Loader(data, VisionConfig(patch_pixels=4), 0, model=dataclasses.replace(MODEL, width=128))
    with pytest.raises(DataError, match="sizes_and_costs_digest"):
        check_fingerprint(saved, other.fingerprint())


def test_bad_records_are_quarantined_with_line_and_reason_and_stay_out_when_they_are_mended(three, tmp_path):
    source, run = three(), tmp_path / "run"
    b = Path(source.split(";")[1])
    whole = (b.parent / "4-0.png").read_bytes()
    (b.parent / "4-0.png").write_bytes(whole[:-25])
    shutil.copy(b.parent / "4-0.png", b.parent / "kept.png")
    (b.parent / "7-0.png").write_bytes(b"")
    loader = load(source, run, bad_sample="skip")
    batches = [digest(loader.batch(step)) for step in range(8)]
    lines = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["index"]) for line in lines] == [("record", 7), ("picture", 4)]
    assert "line 8, image '7-0.png'" in lines[0]["where"] and "no known picture" in lines[0]["reason"]
    assert "line 5, image '4-0.png'" in lines[1]["where"] and lines[1]["source_digest"]
    (b.parent / "4-0.png").write_bytes(whole)
    (b.parent / "7-0.png").write_bytes(whole)
    for is_index_kept in (True, False):
        if not is_index_kept:
            shutil.rmtree(run / "data_index")
        again = load(source, run, bad_sample="skip")
        assert [digest(again.batch(step)) for step in range(8)] == batches
        assert again.fingerprint() == loader.fingerprint()
    assert len((run / "quarantine.jsonl").read_text().splitlines()) == 2
    fresh = load(source, tmp_path / "other", bad_sample="skip")
    assert fresh.counters()["skipped"] == 0
    assert not (tmp_path / "other/quarantine.jsonl").exists()


def test_more_bad_records_than_the_budget_stop_the_run(three, tmp_path):
    source = three()
    b = Path(source.split(";")[1])
    for number in range(4):
        (b.parent / f"{number}-0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"bad records: found 4 of 10; expected at most 3.*line 4"):
        load(source, bad_sample="skip", max_bad_samples=3)
    assert load(source, bad_sample="skip", max_bad_samples=0, max_bad_share=0.4).num_skipped == 4
    cut = (b.parent / "9-0.png").read_bytes()[:-25]
    for number in range(10):
        (b.parent / f"{number}-0.png").write_bytes(cut)
    loader = load(source, bad_sample="skip", max_bad_samples=2)
    with pytest.raises(DataError, match=r"bad records: found 3 of 55"):
        [loader.batch(step) for step in range(9)]


def test_a_cut_line_of_the_quarantine_is_found_out_again_and_a_strange_one_refused(three, tmp_path):
    source, run = three(), tmp_path / "run"
    (Path(source.split(";")[1]).parent / "7-0.png").write_bytes(b"")
    load(source, run, bad_sample="skip")
    content = (run / "quarantine.jsonl").read_text()
    (run / "quarantine.jsonl").write_text(content + content[:30])
    assert load(source, run, bad_sample="skip").num_skipped == 1
    (run / "quarantine.jsonl").write_text("x\n")
    with pytest.raises(DataError, match=r"quarantine\.jsonl: found a line that is not JSON"):
        load(source, run, bad_sample="skip")


def test_a_source_lost_in_mid_run_stops_it_or_leaves_its_turns_to_the_others_and_a_resume_repeats_it(three, tmp_path):
    source, run = three(), tmp_path / "run"
    weighted = ";".join(f"{path},1" for path in source.split(";"))
    stopping = load(weighted)
    said: list[str] = []
    loader = load(weighted, run, lost_source="reweight", say=said.append)
    before = [digest(loader.batch(step)) for step in range(4)]
    shutil.move(tmp_path / "b", tmp_path / "gone")
    with pytest.raises(LostFileError, match=r"b/d\.jsonl"):
        [stopping.batch(step) for step in range(4)]
    after = [loader.batch(step) for step in range(4, 80)]
    assert len(said) == 1 and "lost the source" in said[0] and "at step 4" in said[0]
    assert not any(text[0] == "b" for batch in after for text in texts(batch))
    late = Counter(text[0] for batch in after[-20:] for text in texts(batch))
    assert late["a"] / late.total() == pytest.approx(0.5, abs=0.05)
    event = json.loads((run / "lost_sources.jsonl").read_text())
    assert event["from_step"] == 4 and event["source"].endswith("b/d.jsonl")
    for is_back in (False, True):
        if is_back:
            shutil.move(tmp_path / "gone", tmp_path / "b")
        resumed = load(weighted, run, lost_source="reweight", say=said.append)
        assert resumed.fingerprint() == loader.fingerprint()
        assert [digest(resumed.batch(step)) for step in range(4, 80)] == [digest(batch) for batch in after]
    # Before the loss nothing changed; with the file back those batches can be made again.
    assert [digest(resumed.batch(step)) for step in range(4)] == before


def test_a_source_absent_at_the_first_start_stays_out_and_the_last_one_is_never_given_up(three, tmp_path):
    source, run, said = three(), tmp_path / "run", []
    shutil.move(tmp_path / "c", tmp_path / "gone")
    with pytest.raises(LostFileError, match=r"c/d\.jsonl"):
        load(source, run)
    loader = load(source, run, lost_source="reweight", say=said.append)
    assert "going on without" in said[0]
    seen = {text[0] for step in range(9) for text in texts(loader.batch(step))}
    assert seen == {"a", "b"}
    shutil.move(tmp_path / "gone", tmp_path / "c")
    assert load(source, run, lost_source="reweight", say=said.append).fingerprint() == loader.fingerprint()
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    with pytest.raises(LostFileError, match="no source left"):
        load(source, tmp_path / "other", lost_source="reweight", say=said.append)


def test_several_hosts_do_not_go_on_by_themselves_without_a_source(three, tmp_path):
    loader = load(three(), lost_source="reweight", num_hosts=2)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(LostFileError):
        [loader.batch(step) for step in range(9)]


def test_waiting_for_a_source_ends_when_it_is_back_or_time_is_up(three, tmp_path, monkeypatch):
    monkeypatch.setattr("mmjax.data.sources.mixture.POLL_SECONDS", 0.01)
    source, said = three(), []
    loader = load(source, lost_source="wait", lost_source_wait_seconds=60, say=said.append)
    expected = [digest(load(source).batch(step)) for step in range(4)]
    shutil.move(tmp_path / "b", tmp_path / "gone")
    monkeypatch.setattr(time, "sleep", lambda _: shutil.move(tmp_path / "gone", tmp_path / "b"))
    assert [digest(loader.batch(step)) for step in range(4)] == expected
    assert len(said) == 1 and said[0].startswith("waiting for")
    shutil.move(tmp_path / "b", tmp_path / "gone")
    monkeypatch.undo()
    impatient = load(source.split(";")[0], lost_source="wait", lost_source_wait_seconds=1, say=said.append)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(LostFileError):
        impatient.batch(0)


def test_batches_of_many_shapes_of_pictures_have_no_more_shapes_than_declared(tmp_path):
    random = np.random.default_rng(0)
    lines = []
    for number in range(200):
        side = random.integers(1, 40, 2)
        PIL.Image.fromarray(np.zeros((*side, 3), np.uint8)).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "x"}]
        lines.append(json.dumps({"conversations": turns, "image": f"{number}.png"}) + "\n")
    (tmp_path / "d.jsonl").write_text("".join(lines))
    for buckets in (1, 3):
        settings = {"rows": 1, "row_patches": 64, "row_tokens": 24, "patch_buckets": buckets}
        loader = load(str(tmp_path / "d.jsonl"), **settings)
        shapes = {tuple(array.shape for array in loader.batch(step)) for step in range(60)}
        assert 1 < len(shapes) <= 3 if buckets == 3 else len(shapes) == 1
    data = dataclasses.replace(SMALL, row_patches=100, patch_buckets=9)
    assert patch_sizes(data) == [100, 52, 28, 16, 8, 4]
    assert patch_sizes(dataclasses.replace(data, row_patches=0)) == [0]
