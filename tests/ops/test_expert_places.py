"""Places of the rows of experts in the parts of an exchanged buffer, beside plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autofuse.lowering.cpu.expert_places import FEW_ROWS, Places, Route

SPLITS = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum)


@given(SPLITS, st.data())
def test_rows_are_scattered_to_their_places(splits: list[int], data: st.DataObject) -> None:
    total = sum(splits)
    positions = torch.tensor(
        data.draw(st.lists(st.integers(0, total - 1), max_size=2 * total)), dtype=torch.int64
    )
    places = Places.of(positions, len(positions), splits, "op")
    assert places.distinct == (len(positions.unique()) == len(positions))
    p = torch.arange(1.0, 2 * len(positions) + 1).view(-1, 2)
    route = Route(p, places, full=places.distinct and len(positions) == total)
    parts = [torch.full((n, 2), torch.nan) for n in splits]
    for dest, part in enumerate(parts):
        route.store(part, dest)
    torch.testing.assert_close(torch.cat(parts), torch.zeros(total, 2).index_add_(0, positions, p))


@given(st.lists(st.lists(st.integers(0, 2 * FEW_ROWS), min_size=3, max_size=3), min_size=1, max_size=4))
def test_runs_of_rows_sorted_by_expert(counts: list[list[int]]) -> None:
    # counts[source][expert]: rows arrive by source, then expert, and are multiplied by expert.
    by_source = torch.tensor(counts)
    expert = torch.arange(3).repeat(len(counts)).repeat_interleave(by_source.flatten())
    positions, splits = expert.argsort(stable=True), by_source.sum(1)
    ends = by_source.sum(0).cumsum(0).tolist()
    places = Places.of(positions, len(positions), splits.tolist(), "op")
    runs = places.runs([*zip([0, *ends[:-1]], ends, strict=True)])
    if runs is None:
        assert len(positions) < FEW_ROWS * int((by_source > 0).sum())
        return
    starts = splits.cumsum(0) - splits
    covered = torch.full((len(positions),), -1)
    for part, of_part in enumerate(runs):
        for run in of_part:
            first = ([0, *ends][run.expert]) + run.row
            assert (covered[first : first + run.length] == -1).all()
            covered[first : first + run.length] = starts[part] + run.at + torch.arange(run.length)
            assert int(starts[part]) + run.at + run.length <= int(starts[part] + splits[part])
    assert covered.equal(positions)


@pytest.mark.parametrize("positions", [[0, 3], [-1, 0], [0], [[0, 1]]])
def test_positions_that_are_none(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 3\)|expected a position for each of 2 rows"):
        Places.of(torch.tensor(positions), 2, [1, 2], "op")
