"""Drawings of plans: nothing lies outside, nothing overlaps, and every transfer is shown."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from expecttest import assert_expected_inline

from autofuse.lowering.drawing import draw_svg, draw_text
from autofuse.lowering.orders import make_plan
from autofuse.lowering.plan import FAMILIES, Plan, links

VARIANTS = [(op, order, False) for op in FAMILIES for order in ("ring", "direct", "oblivious")]
VARIANTS += [("matmul_all_reduce", "direct", True)]
SVG = "{http://www.w3.org/2000/svg}"


def plans_of(op: str, order: str, world: int, one_shot: bool = False) -> list[Plan]:
    return [make_plan(op, order, world, rank, ((4, 8),) * world, (2, 8), one_shot) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 5, 20])
@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_a_drawing_is_well_formed(op: str, order: str, one_shot: bool, world: int) -> None:
    svg = ElementTree.fromstring(draw_svg(plans_of(op, order, world, one_shot)))
    width, height = (float(svg.attrib[name]) for name in ("width", "height"))
    rows: dict[float, list[tuple[float, float]]] = {}
    for rect in svg.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        rows.setdefault(y, []).append((x, x + w))
    assert len(rows) == min(world, 16)
    for boxes in rows.values():
        assert boxes == sorted(boxes)
        assert all(end < start for (_, end), (start, _) in pairwise(boxes))
    assert not any("id" in element.attrib for element in svg.iter())
    texts = [text.text or "" for text in svg.iter(f"{SVG}text")]
    assert any("of 20 ranks" in text for text in texts) == (world == 20)


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_every_link_has_an_arrow(op: str, order: str, one_shot: bool) -> None:
    plans = plans_of(op, order, 4, one_shot)
    svg = ElementTree.fromstring(draw_svg(plans))
    arrows = [p.attrib["class"].split() for p in svg.iter(f"{SVG}path") if "a" in p.attrib["class"].split()]
    expected = [1 if len(over) == 12 else len(over) for over in links(plans)]
    assert len(arrows) == sum(expected)
    assert sum("all" in classes for classes in arrows) == sum(len(over) == 12 for over in links(plans))


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_text_keeps_to_its_width(op: str, order: str, one_shot: bool, width: int) -> None:
    plans = plans_of(op, order, 8, one_shot)
    text = draw_text(plans, width)
    tables = [line for line in text.splitlines() if re.match(r"step|rank|peers ", line)]
    assert max(map(len, tables)) <= width
    steps = [int(s) for line in tables if line.startswith("step") for s in line.split()[1:]]
    assert steps == list(range(len(links(plans))))


def test_a_width_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="10 columns has no room for a step; give it 1"):
        draw_text(plans_of("matmul_reduce_scatter", "direct", 4), 10)


def test_direct_beside_oblivious() -> None:
    assert_expected_inline(
        draw_text(plans_of("matmul_reduce_scatter", "direct", 4), 80),
        """\
matmul_reduce_scatter: direct, 4 ranks, 8 tiles a rank

step    0     1     2     3  4        5
rank 0  1>x2  2>x2  3>x2  0  0 w* r0  w* r0
rank 1  2>x2  3>x2  0>x2  1  1 w* r1  w* r1
rank 2  3>x2  0>x2  1>x2  2  2 w* r2  w* r2
rank 3  0>x2  1>x2  2>x2  3  3 w* r3  w* r3
peers   1     1     1     0  0        0

N: a tile of chunk N, N> at its owner, N>R at rank R, <N from rank N; xT: T tiles
s send, r reduce, c copy, w wait; peers: the most that meet at one rank's memory""",
    )
    assert_expected_inline(
        draw_text(plans_of("matmul_reduce_scatter", "oblivious", 4), 80),
        """\
matmul_reduce_scatter: oblivious, 4 ranks, 8 tiles a rank

step    0     1     2     3     4      5
rank 0  0x2   1>x2  2>x2  3>x2  w* r0  w* r0
rank 1  0>x2  1x2   2>x2  3>x2  w* r1  w* r1
rank 2  0>x2  1>x2  2x2   3>x2  w* r2  w* r2
rank 3  0>x2  1>x2  2>x2  3x2   w* r3  w* r3
peers   3     3     3     3     0      0

N: a tile of chunk N, N> at its owner, N>R at rank R, <N from rank N; xT: T tiles
s send, r reduce, c copy, w wait; peers: the most that meet at one rank's memory""",
    )
