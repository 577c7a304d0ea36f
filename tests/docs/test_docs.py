"""The documents say what the code does: examples run, and every reason code and option is explained."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import autofuse
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.options import OWN_OPTIONS
from tests.ranks import INTERPRETING, RankPool

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))


def blocks(document: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of the Python blocks of a document."""
    text = (ROOT / document).read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start(1)].count("\n"), found[1]


def program(document: str) -> ModuleType:
    """All blocks of a document, run as one module; errors name lines of the document."""
    module = ModuleType(Path(document).stem)
    for line, text in blocks(document):
        exec(compile("\n" * line + text, str(ROOT / document), "exec"), module.__dict__)
    return module


def _checks(rank: int, world: int, document: str) -> None:
    example = program(document)
    example.check(rank, world)
    example.check_kernel(rank, world)


def test_the_example_of_adding_an_op() -> None:
    """On ranks that interpret its Triton kernel."""
    pytest.importorskip("triton")
    pool = RankPool(2, INTERPRETING)  # of its own: the op stays registered
    try:
        pool.run(_checks, "docs/adding-an-op.md", timeout=200)
    finally:
        pool.close()


def test_the_page_of_reasons_explains_every_reason() -> None:
    page = (ROOT / "docs/reasons.md").read_text()
    told = re.findall(r"^## `(\w+)`$", page, re.MULTILINE)
    assert told == [reason.value for reason in autofuse.Reason]


def test_the_guide_has_every_option_and_op() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    for name in (*OWN_OPTIONS, *FUSED_OPS):
        assert f"`{name}`" in guide, name
    for name in OWN_OPTIONS:
        assert f"`AUTOFUSE_{name.upper()}`" in guide, name


def test_the_page_of_reasons_has_a_row_for_every_gap_of_gpu_kernels() -> None:
    page = (ROOT / "docs/reasons.md").read_text()
    for gap in (gap for op in FUSED_OPS.values() for gap in op.gpu_gaps):
        text, field, _ = gap.why.partition("{")
        row = f"| `{text}...` | {gap.remedy} |" if field else f"| `{text}` | {gap.remedy} |"
        assert row in page, f"docs/reasons.md, no_kernel_for_device, lacks the row\n{row}"


def test_the_page_of_ops_has_every_schema() -> None:
    page = " ".join((ROOT / "docs/ops.md").read_text().split())
    for op in FUSED_OPS.values():
        assert op.schema in page, f"docs/ops.md does not have {op.schema}"


def anchors(page: Path) -> set[str]:
    """The fragments that lead to a heading of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, fragment in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" in target:
            continue
        page = path.parent / target if target else path
        assert page.exists(), target
        assert not fragment or fragment in anchors(page), f"{target}#{fragment}"
