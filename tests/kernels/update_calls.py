"""Calls of `embedding_backward` that update tables, on ranks that are CPU processes.

Numbers are small multiples of powers of two. With SGD every bit is checked; Adagrad takes a root.
"""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.embedding.run import exchange_backward
from autofuse.lowering.gpu.embedding.ways import UPDATE, ExchangeProblem
from autofuse.native_kernels.gpu.memory import PeerMemory
from autofuse.native_kernels.gpu.state import State
from autofuse.native_kernels.triton.embedding_tables import Tables
from tests.kernels.backward_calls import Backward
from tests.kernels.calls import peer_memory, straggling
from tests.kernels.embedding_calls import FakeWorkspace

LR, EPS = 0.5, 2.0**-10


@dataclass(frozen=True)
class Update(Backward):
    """As a backward, with what its tables learn. rowwise: by rowwise Adagrad."""

    rowwise: bool = False

    def tables(self, rank: int, seed: int) -> Tables:
        """As the forward has them; lr and eps of table t are 1 / (1 + t) of what they are of the first."""
        tables = self.of.tables(rank, seed)
        generator = torch.Generator().manual_seed(seed)
        states = [torch.randint(0, 9, (len(w),), generator=generator) / 4 for w in tables.weights]
        rates = [torch.tensor([LR, EPS]) / 2**t for t in range(len(states))]
        weights = [w.clone() for w in tables.weights]
        return replace(tables, weights=weights, rates=rates, states=states if self.rowwise else ())

    def check(self, tables: Tables, memory: PeerMemory, seed: int) -> None:
        """What has become of the tables."""
        rank, of = memory.rank, self.of
        before = self.tables(rank, seed)
        for t, grad in enumerate(self.sums(rank, seed)):
            old, new = before.weights[t], tables.weights[t]
            indices = before.indices[t].long()
            touched = torch.zeros(len(old), dtype=torch.bool)
            touched[indices[indices != of.padding]] = True
            assert torch.equal(new[~touched], old[~touched])
            lr, eps = before.rates[t].double()
            if not self.rowwise:
                assert torch.equal(new, (old.double() - lr * grad).float().to(old.dtype)), (self, t)
                continue
            state = before.states[t].double() + grad.square().sum(1) / max(1, old.shape[1])
            assert torch.equal(tables.states[t][~touched], before.states[t][~touched])
            torch.testing.assert_close(tables.states[t].double(), state, rtol=1e-6, atol=0)
            rows = old.double() - (lr / (state.sqrt() + eps))[:, None] * grad
            small = torch.finfo(old.dtype).eps / 2 * rows.abs() + 1e-6 * (1 + grad.abs())
            assert ((new.double() - rows).abs() <= small)[touched].all(), (self, t)


def run_updates(rank: int, world: int, calls: list[Backward]) -> None:
    """One call after another on one memory, with no barrier between, by ranks that straggle."""
    need = calls[0].need(world)
    for call in calls:
        need |= call.need(world)
    memory = peer_memory(rank, world, need)
    with straggling(rank):
        for number, call in enumerate(calls):
            tables = call.tables(rank, number)
            found = call.run(memory, number, tables)
            if isinstance(call, Update):
                call.check(tables, memory, number)
            if call.keep:
                assert torch.equal(found[-1], call.exchanged(rank, number))
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [sum(call.push for call in calls)] + 10 * [0]
    dist.barrier()  # peers may still store
    assert not memory.signals.views[rank].any(), "counters are left over"
    assert not memory.done.any()


def run_update_way(rank: int, world: int, way: str, call: Update) -> None:
    """A call as `lowering.gpu.embedding.run` makes it."""
    memory, of = peer_memory(rank, world, call.need(world)), call.of
    problem = ExchangeProblem(of.b, tuple(of.columns), of.layout, of.wire, 1, UPDATE)
    found_way = replace(ways_of(problem)[way], config=call.config)
    tables, workspace = call.tables(rank, 0), FakeWorkspace(memory)
    given: Any = workspace
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        found = exchange_backward(given, found_way, problem, tables, call.grad(rank, 0), call.keep, "here")
    assert found is not None
    call.check(tables, memory, 0)
    if call.keep:
        assert torch.equal(found[-1], call.exchanged(rank, 0))
    dist.barrier()


def same_rows(rank: int, world: int, call: Update) -> None:
    """Two runs on random values give the same bits."""
    memory = peer_memory(rank, world, call.need(world))
    exchanged = [
        torch.randn(call.exchanged(r, 0).shape, generator=torch.Generator().manual_seed(r)).to(call.of.wire)
        for r in range(world)
    ]
    runs: list[list[Tensor]] = []
    with patch.object(Backward, "exchanged", lambda self, source, seed: exchanged[source]), straggling(rank):
        for _ in range(2):
            tables = call.tables(rank, 0)
            call.run(memory, 0, tables)
            runs.append([*tables.weights, *tables.states])
    assert all(map(torch.equal, *runs))
    dist.barrier()
