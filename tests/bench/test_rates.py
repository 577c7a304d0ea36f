"""How fast links are, measured where there is none: what is moved, at once, and what counts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.bench.gpu import rates
from autofuse.bench.gpu.rates import ALIGNED, TIMES, link_rates, pusher

WORLD, RANK = 3, 1


@pytest.fixture
def log() -> Iterator[list[str]]:
    """On rank 1 of 3: who waits for whom."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            told.append(f"{self.name} waits for {other.name}")

    current = Stream("main")
    with ExitStack() as stack:
        for name, value in {"Stream": Stream, "current_stream": lambda: current}.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda stream: nullcontext()))
        stack.enter_context(patch.object(dist, "get_rank", lambda: RANK))
        stack.enter_context(patch.object(dist, "get_world_size", lambda: WORLD))
        yield told


def _memory() -> tuple[Tensor, list[Tensor]]:
    numbers = 16 * ALIGNED + 5
    return torch.arange(numbers, dtype=torch.float32), [torch.zeros(numbers) for _ in range(WORLD)]


@pytest.mark.parametrize("lanes", rates.LANES)
def test_a_part_goes_to_all_peers_at_once(log: list[str], lanes: int) -> None:
    mine, views = _memory()
    push, nbytes = pusher(mine, views, [0, 2], rates._copy, lanes)
    push()
    half = 2 * lanes
    assert log == ["side waits for main"] * half + ["main waits for side"] * half
    part = slice(nbytes // 4 * RANK, nbytes // 4 * (RANK + 1))
    assert nbytes // 4 > 3 * ALIGNED
    for view, is_peer in zip(views, (True, False, True), strict=True):
        assert torch.equal(view[part], mine[part] if is_peer else torch.zeros_like(mine[part]))
        view[part] = 0
        assert not view.any(), "what other ranks store is overwritten"


def test_the_fastest_way_counts(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds are given out in the order of samples, so that the last way to move is the fastest."""
    mine, views = _memory()
    ways, last = len(rates.LANES) + 1, 4 * (16 * ALIGNED // WORLD // ALIGNED * ALIGNED)

    def sample(run: Callable[[], None], times: int) -> float:
        run()
        sample.calls += 1  # type: ignore[attr-defined]
        return 5e3 - sample.calls  # type: ignore[attr-defined]

    sample.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(rates, "sample", Mock(side_effect=sample))
    monkeypatch.setattr(rates, "slowest", lambda us: us)
    found = link_rates(mine, views)
    best = [5e3 - (i + 1) * ways * rates.SAMPLES for i in range(3)]
    expected = [(WORLD - 1) * last * TIMES / us / 1e3 for us in best]
    assert list(found) == ["all", "out", "in"]
    assert list(found.values()) == pytest.approx(expected)
    assert not views[RANK].any()
    assert views[0].any()
