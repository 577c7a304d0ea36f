"""The positions of a chunk, run by run, against all positions in order."""

from itertools import combinations

import torch

from autofuse.lowering.cpu.tiles import Cut
from autofuse.lowering.plan import Span


def test_runs_are_the_positions_of_a_chunk() -> None:
    for outer, world, inner in ((1, 3, 4), (2, 2, 3), (3, 4, 2)):
        whole = torch.arange(outer * world * inner)
        cut = Cut.even(len(whole), world, outer)
        for chunk in range(world):
            positions = whole.view(outer, world, inner)[:, chunk].flatten()
            for start, stop in combinations(range(len(positions) + 1), 2):
                stretches = (stop - start) % inner == 0 and start % inner == 0
                if outer > 1 and start // inner != (stop - 1) // inner and not stretches:
                    continue  # a span crosses stretches only as a multiple of them
                found = cut.run(chunk, Span(start, stop)).read(whole, 0)
                assert torch.equal(found, positions[start:stop]), (outer, world, inner, chunk, start, stop)
