"""The timelines of the pages on GPUs are what the script makes of their texts."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def timelines() -> ModuleType:
    path = ROOT / "docs/pictures/timelines.py"
    spec = importlib.util.spec_from_file_location("timelines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_what_its_text_says_and_stands_in_a_page(timelines: ModuleType) -> None:
    pictures = timelines.pictures()
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("gpu*.md"))
    assert set(pictures) == set(timelines.FOLDER.glob("*.svg"))
    for path, svg in pictures.items():
        assert path.read_text() == svg, f"{path.name}: run python docs/pictures/timelines.py"
        assert f"](pictures/timelines/{path.name})" in pages, f"no docs/gpu*.md shows {path.name}"


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        ("    0 9 move a\n    8 12 move b", "begins before the interval before it ends"),
        ("    0 3 move far too long", "no room for 'far too long'"),
        ("    0 9 move a\n[arrows]\na 5 > a 3", "goes back in time"),
        ("    from 0 to 9", "no line of a timeline"),
    ],
)
def test_a_picture_that_nobody_could_read_is_refused(timelines: ModuleType, lane: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timelines.draw(timelines.parse(f"# title\n[rank 0]\na: lane\n{lane}"))
