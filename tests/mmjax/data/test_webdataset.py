import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mmjax.config import DataConfig, VisionConfig
from mmjax.data import images
from mmjax.data.index_cache import IndexCache
from mmjax.data.loader import Loader
from mmjax.data.sources import webdataset
from mmjax.data.sources.webdataset import WebDataset
from mmjax.errors import DataError

ANSWER = {"role": "assistant", "content": "so."}


def png(colour: int = 0) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def question(text: str | list, **more) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}, ANSWER], **more}).encode()


def write(path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            if isinstance(name, str):
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def open_tar(path: Path) -> WebDataset:
    return WebDataset(path, IndexCache())


def test_samples_are_read_in_any_order_with_their_own_pictures(tmp_path):
    members: list = [(tarfile.TarInfo("a"), b"")]
    members[0][0].type = tarfile.DIRTYPE
    for n in range(3):
        members += [(f"a/{n}.json", question("<image><image>?")), (f"a/{n}.1.png", png(n)), (f"a/{n}.0.PNG", png(9))]
    members += [("b.txt", b" a caption\n"), ("b.jpg", png(7)), ("c.json", question("text alone"))]
    file = open_tar(write(tmp_path / "a.tar", members))
    assert len(file) == 5
    for n in (2, 0, 1):
        colours = [images.read_pixels(p, max_pixels=100, channels=1)[0, 0, 0] for p in file[n].pictures]
        assert colours == [9, n] and file[n].where == f"{tmp_path / 'a.tar'}, sample 'a/{n}'"
    assert [message.role for message in file[3].messages] == ["user", "assistant"]
    assert file[3].messages[1].text == "a caption" and len(list(file[3].pictures)) == 1
    assert file[4].messages[0].text == "text alone"
    assert os.listdir(tmp_path) == ["a.tar"]


def test_a_record_names_its_pictures_by_ending_or_whole(tmp_path):
    members = [
        ("x.json", question("<image><image>", images=["1.png", "x.0.png"])),
        ("x.0.png", png(1)),
        ("x.1.png", png(2)),
    ]
    file = open_tar(write(tmp_path / "a.tar", members))
    assert [images.read_pixels(p, max_pixels=100, channels=1)[0, 0, 0] for p in file[0].pictures] == [2, 1]
    for path in ("../x.0.png", "/etc/passwd", "2.png", "http://localhost/0.png"):
        file = open_tar(write(tmp_path / "b.tar", [("x.json", question("<image>", images=[path])), ("x.0.png", png())]))
        with pytest.raises(DataError, match="sample 'x': found no member for the picture"):
            file[0]


def test_more_than_ten_pictures_stand_in_the_order_of_their_numbers(tmp_path):
    members = [("x.json", question("<image>" * 12))] + [(f"x.{n}.png", png(n)) for n in reversed(range(12))]
    members += [("y.txt", b"two")] + [(f"y.page{n}.png", png(n)) for n in (10, 9)]
    file = open_tar(write(tmp_path / "a.tar", members))
    for number, expected in ((0, list(range(12))), (1, [9, 10])):
        found = [images.read_pixels(p, max_pixels=100, channels=1)[0, 0, 0] for p in file[number].pictures]
        assert found == expected


def test_a_record_names_its_pictures_in_the_parts_of_a_message(tmp_path):
    named = [{"type": "image", "image": "1.png"}, {"type": "image_url", "image_url": {"url": "x.0.png"}}]
    for parts, colours in ((named, [2, 1]), ([{"type": "image", "path": None}] * 2, [1, 2])):
        record = question([*parts, {"type": "text", "text": "?"}])
        members = [("x.json", record), ("x.0.png", png(1)), ("x.1.png", png(2))]
        sample = open_tar(write(tmp_path / "a.tar", members))[0]
        assert [images.read_pixels(p, max_pixels=100, channels=1)[0, 0, 0] for p in sample.pictures] == colours


def member(name: str, **fields) -> tarfile.TarInfo:
    result = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(result, field, value)
    return result


HOSTILE = {
    "leads upwards": [("../x.json", b"{}")],
    "link": [(member("x.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")],
    "inner link": [("y.json", b"{}"), (member("x.json", type=tarfile.SYMTYPE, linkname="y.json"), b"")],
    "hard link": [(member("x.json", type=tarfile.LNKTYPE, linkname="y.json"), b"")],
    "device": [(member("x.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5), b"")],
    "pipe": [(member("x.json", type=tarfile.FIFOTYPE), b"")],
    "twice": [("x.json", b"{}"), ("x.json", b"[]")],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_leads_out_of_itself_is_refused_and_nothing_is_written(kind, tmp_path):
    path = write(tmp_path / "a.tar", HOSTILE[kind])
    with pytest.raises(DataError, match=r"a\.tar: found"):
        open_tar(path)
    assert os.listdir(tmp_path) == ["a.tar"]


def test_an_absolute_name_is_only_a_name(tmp_path):
    assert open_tar(write(tmp_path / "a.tar", [("/etc/x.json", question("q"))]))[0].messages[0].text == "q"


def test_an_archive_cut_off_compressed_or_of_another_kind_is_refused(tmp_path):
    whole = write(tmp_path / "a.tar", [(f"{n}.json", question("q" * 2000)) for n in range(20)]).read_bytes()
    bad = {"cut": whole[: len(whole) // 2 + 100], "empty": b"", "html": b"<html>" * 200, "gz": gzip.compress(whole)}
    for name, content in bad.items():
        (tmp_path / f"{name}.tar").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.tar: found no"):
            open_tar(tmp_path / f"{name}.tar")
    (tmp_path / "a.tar.gz").write_bytes(bad["gz"])
    with pytest.raises(DataError, match=r"a compressed file \(\.gz\).*decompress"):
        Loader(DataConfig(source=str(tmp_path / "a.tar.gz")), VisionConfig(), 0)
    # Of what unpacks to more than it is, nothing is unpacked.
    for ending in (".zip", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"):
        with pytest.raises(DataError, match="a compressed file"):
            Loader(DataConfig(source=str(tmp_path / f"a{ending}")), VisionConfig(), 0)


def test_a_member_that_claims_more_than_it_may_hold_is_refused_unread(tmp_path, monkeypatch):
    path = write(
        tmp_path / "a.tar", [("x.json", question("<image>")), ("x.png", png()), ("y.json", question("q" * 999))]
    )
    file = open_tar(path)
    monkeypatch.setattr(webdataset, "MAX_RECORD_BYTES", 500)
    monkeypatch.setattr(webdataset, "MAX_MEDIUM_BYTES", 10)
    with pytest.raises(DataError, match=r"sample 'y': found [\d,]+ bytes in \.json"):
        file[1]
    with pytest.raises(DataError, match=r"sample 'x': found [\d,]+ bytes in \.png"):
        images.read_pixels(next(file[0].pictures), max_pixels=100, channels=3)
    # A sparse member spells gigabytes in a few bytes.
    sparse = member("z.json", type=tarfile.GNUTYPE_SPARSE, size=0)
    block = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"77777777777\0"
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 8 * 32)
    (tmp_path / "z.tar").write_bytes(bytes(block) + bytes(10_240))
    with pytest.raises(DataError, match=r"z\.tar: found"):
        open_tar(tmp_path / "z.tar")


def test_a_sample_without_record_and_caption_is_named(tmp_path):
    file = open_tar(
        write(tmp_path / "a.tar", [("x.png", png()), ("y.txt", b"text"), ("z.txt", b"\xff"), ("z.png", png())])
    )
    for number, words in enumerate(["members png", "members txt", "invalid text"]):
        with pytest.raises(DataError, match=f"sample '{'xyz'[number]}': found {words}"):
            file[number]


def test_broken_pictures_of_an_archive_are_skipped_like_those_of_a_folder(tmp_path):
    members = []
    for n in range(4):
        members += [(f"{n}.json", question(f"<image>{n}")), (f"{n}.png", png(n) if n != 2 else png(n)[:-30])]
    path = write(tmp_path / "a.tar", members)
    settings = {"rows": 4, "row_tokens": 16, "row_patches": 16, "image_max_patches": 16}
    with pytest.raises(DataError, match="sample '2', image 'png'"):
        Loader(DataConfig(source=str(path), **settings), VisionConfig(), 0).batch(0)
    loader = Loader(DataConfig(source=str(path), bad_sample="skip", **settings), VisionConfig(), 0)
    assert (loader.batch(0).segment_ids.max(axis=1) > 0).sum() == 3 and loader.counters()["skipped"] == 1
