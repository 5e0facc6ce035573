"""Documents: links lead somewhere, and the README tells what the pages of measurements tell."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def _anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_readme_tells_the_numbers_of_the_pages_that_measured_them() -> None:
    measured = (ROOT / "README.md").read_text().split("## Measured")[1].split("\n## ")[0]
    numbers = re.findall(r"[\d,]+ tokens/s|[\d.]+ (?:GB|%)|0\.\d{3}|\d+:\d\d CPU minutes", measured)
    pages = " ".join((ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "verification.md"))
    assert len(numbers) > 20 and [number for number in numbers if number not in pages] == []
