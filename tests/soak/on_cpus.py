"""One episode of random calls on CPU ranks: several groups, stragglers, and perhaps a rank that is killed."""

import os
import random
import signal
import threading
import time
from unittest.mock import patch

import torch
import torch.distributed as dist

from autofuse import config, ops
from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.update_rules import numbers_at, sgd_terms
from tests.ranks import fresh_group
from tests.robustness.seven import MAKERS, Case, integers
from tests.soak.counts import Counts

SIZES = (1, 2, 3, 5, 8, 13, 31)
ORDERS = ("direct", "ring", "oblivious")
GROUPS = 3
LONGEST_PAUSE_S = 0.1
PAUSES_A_SIGNAL = 1 / 20_000
CALLS_BETWEEN_LOOKS = 200
TIMEOUT_S = 60.0


def update(rank: int, world: int, size: int, group: str) -> Case:
    """A step of SGD from 0 with lr = -1, by which parameters become sums; some in two phases."""
    sizes = (size, 0, 700 * size)
    grads = [[integers(10 * r + i, n) for i, n in enumerate(sizes)] for r in range(world)]
    numbers = torch.tensor(
        [numbers_at(sgd_terms(0.0, 0.0, 0.0, False), 1, -1.0)] * len(sizes), dtype=torch.float64
    )
    exact = torch.cat([sum(of_ranks) for of_ranks in zip(*grads, strict=True)]).double()

    def run(factor: float) -> torch.Tensor:
        params = [torch.zeros(n) for n in sizes]
        torch.ops.autofuse.reduce_update_gather(
            params, [g * factor for g in grads[rank]], [], numbers, "sgd", "sum", 1e9 * (size % 2), False,
            ["a", "b", "c"], group, "direct", "soak",
        )  # fmt: skip
        return torch.cat(params)

    return Case(run, exact, replicated=True)


CASES = (*MAKERS.values(), update)


def episode(
    rank: int, world: int, seed: int, seconds: float, victim: int, after_s: float, directory: str
) -> None:
    """Calls for some seconds, the same on all ranks.

    victim: the rank that is killed `after_s` behind the first call, wherever it is then; -1: none. Before
    that call nobody knows its process, and peers wait for it until the timeout. A survivor ends its process
    as soon as a call raises, as a job would.
    """
    counts, common, own = Counts(), random.Random(seed), random.Random(seed * 97 + rank)
    cases = [_cases(rank, world, fresh_group()) for _ in range(GROUPS - 1)] + _paired(rank, world)
    config.timeout_s = TIMEOUT_S
    _rank_0_says(False)
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    send = Call.signal

    def late(call: Call, dest: int, slot: int) -> None:
        if own.random() < PAUSES_A_SIGNAL:
            counts.late += 1
            time.sleep(own.random() * LONGEST_PAUSE_S)
        send(call, dest, slot)

    try:
        with patch.object(Call, "signal", late):
            _calls(counts, common, cases, time.monotonic() + seconds)
    except RuntimeError as error:
        counts.unnamed = int("has died" not in str(error))
        counts.write(directory, rank)
        os._exit(1)
    counts.write(directory, rank)


def _calls(counts: Counts, common: random.Random, cases: list[list[Case]], end: float) -> None:
    while not _rank_0_says(time.monotonic() > end):
        for _ in range(CALLS_BETWEEN_LOOKS):
            group, number = common.randrange(GROUPS), common.randrange(len(SIZES) * len(CASES))
            factor, order = common.randrange(1, 8), common.choice(ORDERS)
            if group == len(cases):
                continue  # the last rank of an odd number has no neighbour
            case = cases[group][number]
            with config.patch(order=order):
                found = case.run(factor)
            counts.calls += 1
            counts.wrong += not torch.equal(found, (case.exact * factor).float())


def _rank_0_says(done: bool) -> bool:
    """A fused op carries the word: it names a rank that has died."""
    word = torch.tensor([[float(done and dist.get_rank() == 0)]])
    return bool(ops.matmul_all_reduce(word, torch.ones(1, 1)).item())


def _paired(rank: int, world: int) -> list[list[Case]]:
    """The cases of the group of this rank and its neighbour; none where there is no neighbour."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    return [_cases(rank % 2, 2, groups[rank // 2].group_name)] if rank // 2 < len(groups) else []


def _cases(rank: int, world: int, group: str) -> list[Case]:
    return [maker(rank, world, size, group) for size in SIZES for maker in CASES]
