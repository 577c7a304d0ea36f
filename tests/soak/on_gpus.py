"""One episode of random calls on GPUs: eager and captured, on several streams, of two groups, beside NCCL.

NCCL works for a group of its own on other streams, with messages from 1 KB to 256 MB. Hosts sleep, wait for
their device, or give memory back to the driver, each on its own; GPUs spin. All ranks draw the same calls.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import autofuse
from tests.soak.counts import Counts
from tests.soak.gpu_cases import Case, draw_ways, makers

GROUPS, STREAMS, GRAPHS, CALLS_A_GRAPH = 2, 10, 12, 3
MESSAGES = [1 << shift for shift in range(10, 29)]
NEW_GROUPS_A_ROUND = 1 / 1000
TIMEOUT_S = 20.0
ROUNDS_BETWEEN_LOOKS = 100


@dataclass
class _Nccl:
    """Collectives of another group; every result is checked on the device."""

    group: ProcessGroup
    world: int
    wrong: Tensor
    memory: Tensor = field(
        default_factory=lambda: torch.empty(2 * MESSAGES[-1], dtype=torch.uint8, device="cuda")
    )

    def launch(self, kind: int, nbytes: int) -> None:
        """Launches one collective on the current stream."""
        count = nbytes // 4 // self.world * self.world
        whole = self.memory[: 4 * count].view(torch.float32)
        part = self.memory[MESSAGES[-1] :][: 4 * count // self.world].view(torch.float32)
        if kind == 0:
            whole.fill_(1)
            dist.all_reduce(whole, group=self.group)
        elif kind == 1:
            part.fill_(self.world)
            dist.all_gather_into_tensor(whole, part, group=self.group)
        else:
            whole.fill_(1)
            dist.reduce_scatter_tensor(part, whole, group=self.group)
        self.wrong += (part if kind == 2 else whole).ne(self.world).any()


def _disturb(own: random.Random, counts: Counts, stream: torch.cuda.Stream) -> None:
    """One disturbance of this rank alone, or none."""
    drawn = own.random()
    if drawn < 0.05:
        time.sleep(own.random() * 0.002)
    elif drawn < 0.0505:
        counts.late += 1
        time.sleep(own.random() * 0.1)
    elif drawn < 0.15:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(own.random() * 400_000))
    elif drawn < 0.16:
        torch.cuda.synchronize()
    elif drawn < 0.165:
        del_me = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del del_me
        torch.cuda.empty_cache()  # cudaFree waits for the whole device


def _captured(calls: list[Case], wrong: Tensor) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in calls:
            wrong += case.run().ne(case.exact).any()
    return graph.replay


def episode(
    rank: int, world: int, seed: int, seconds: float, victim: int, after_s: float, directory: str
) -> None:
    """Rounds for some seconds; victim: the rank that is killed `after_s`, -1: none."""
    counts, common, own = Counts(), random.Random(seed), random.Random(seed * 97 + rank)
    autofuse.config.timeout_s = TIMEOUT_S
    groups = [dist.new_group() for _ in range(GROUPS)]
    draw_ways(seed)
    # A counter for each stream and graph: two streams that add to one would lose counts.
    wrong = torch.zeros(STREAMS + GRAPHS, dtype=torch.int64, device="cuda")
    nccl = _Nccl(dist.new_group(), world, wrong[0])
    drawn = makers(common)
    everything = [[case for make in drawn for case in make(rank, world, group)] for group in groups]
    for of_group in everything:
        for case in of_group:
            case.run()
            case.run()
    nccl.launch(0, 1024)
    torch.cuda.synchronize()
    replays = []
    for counter in wrong[STREAMS:]:
        calls = [common.choice(common.choice(everything)) for _ in range(CALLS_A_GRAPH)]
        replays.append(_captured(calls, counter))
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    torch.cuda.synchronize()
    wrong.zero_()
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        end, done = time.monotonic() + seconds, False
        while not done:
            for _ in range(ROUNDS_BETWEEN_LOOKS):
                _round(counts, common, own, nccl, everything, replays, streams, wrong)
            for stream in streams:  # a host orders no replays
                torch.cuda.current_stream().wait_stream(stream)
            done = _rank_0_says(time.monotonic() > end, groups[0])
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
        counts.unnamed = int("has died" not in str(error))
        counts.write(directory, rank)
        os._exit(1)
    counts.wrong += int(wrong.sum())
    counts.write(directory, rank)


def _round(
    counts: Counts,
    common: random.Random,
    own: random.Random,
    nccl: _Nccl,
    everything: list[list[Case]],
    replays: list[Callable[[], None]],
    streams: list[torch.cuda.Stream],
    wrong: Tensor,
) -> None:
    """A collective of NCCL on the first stream, perhaps, and some fused calls on others.

    Replays wait for all fused calls before them and later calls for them: a host orders no replays.
    """
    counts.rounds += 1
    if common.random() < NEW_GROUPS_A_ROUND:  # the first collective of a group blocks the host
        nccl.group = dist.new_group()
    if common.random() < 0.6:
        kind, nbytes = common.randrange(3), common.choice(MESSAGES)
        with torch.cuda.stream(streams[0]):
            nccl.launch(kind, nbytes)
    for _ in range(common.randrange(1, 4)):
        lane, replay = common.randrange(1, STREAMS), common.random() < 0.3
        stream = streams[lane]
        group, case = common.randrange(GROUPS), common.randrange(len(everything[0]))
        number = common.randrange(len(replays))
        _disturb(own, counts, stream)
        with torch.cuda.stream(stream):
            if replay:
                for other in streams[1:]:
                    stream.wait_stream(other)
                replays[number]()
                for other in streams[1:]:
                    other.wait_stream(stream)
                counts.calls += CALLS_A_GRAPH
            else:
                chosen = everything[group][case]
                wrong[lane] += chosen.run().ne(chosen.exact).any()
                counts.calls += 1


def _rank_0_says(done: bool, group: ProcessGroup) -> bool:
    word = torch.full((1, 256), float(done and dist.get_rank() == 0), dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(256, 256, dtype=torch.bfloat16, device="cuda") / 256
    return bool(autofuse.ops.matmul_all_reduce(word, ones, group=group)[0, 0].item())
