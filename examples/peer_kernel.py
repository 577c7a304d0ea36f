"""A Triton kernel of your own that talks to its peers: all_gather in one launch, with autofuse's functions.

Every program stores its block of x into the memory of all ranks, signals, waits for the blocks that the same
program of each rank stores here, and copies them to the output. `docs/kernels.md` explains every step.

    torchrun --nproc-per-node 4 examples/peer_kernel.py                        # a GPU a rank
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 examples/peer_kernel.py     # no GPU
"""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from autofuse.lowering.torch_internals import symmetric_empty, symmetric_views
from autofuse.native_kernels.gpu.state import RECORD_WORDS, STATE_WORDS
from autofuse.native_kernels.triton.comm import begin, finish, half_of, peer, signal_all, wait_all


@triton.jit
def all_gather(
    x, out, memory, state, rank,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: BLOCKS. Memory of a rank: fp32 [2, W, COUNT], then counters, int32 [2, W, BLOCKS]."""
    program = tl.program_id(0)
    epoch = begin(state)
    half = half_of(epoch) * W  # a rank that runs ahead writes into the other half
    counters = 2 * W * COUNT + half * BLOCKS + program
    at = program * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(x + at, mask=at < COUNT)
    for i in tl.static_range(1, W + 1):  # peers first, each rank another one
        there = peer(memory, (rank + i) % W, tl.float32) + (half + rank) * COUNT
        tl.store(there + at, block, mask=at < COUNT)
    signal_all(memory, W, counters + rank * BLOCKS, -1)
    arrived = peer(memory, rank, tl.int32) + counters
    wait_all(arrived, BLOCKS, W, 1, state, 1, 0, program, epoch)
    for r in tl.static_range(W):
        here = peer(memory, rank, tl.float32) + (half + r) * COUNT
        tl.store(out + r * COUNT + at, tl.load(here + at, mask=at < COUNT), mask=at < COUNT)
        tl.store(arrived + r * BLOCKS, 0)  # no other program waits for these counters
    finish(state, epoch, BLOCKS)


def map_memory(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """`nbytes` of every rank, 0 at first, as this rank maps them."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    if device.type == "cuda":
        return symmetric_views(symmetric_empty(nbytes, torch.uint8, device).zero_(), dist.group.WORLD)
    files = [f"/dev/shm/peer_kernel-{os.environ['MASTER_PORT']}-{r}" for r in ranks]
    torch.from_file(files[rank], shared=True, size=nbytes, dtype=torch.uint8).zero_()
    dist.barrier()
    views = [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]
    dist.barrier()
    os.unlink(files[rank])
    return views


def main(count: int = 100_000, block: int = 4096, calls: int = 5) -> None:
    """Gathers `count` numbers of every rank, `calls` times, and compares with what they must be."""
    rank, world, gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    blocks = triton.cdiv(count, block)
    views = map_memory(2 * world * (count + blocks) * 4, device)
    memory = torch.tensor([view.data_ptr() for view in views], device=device)
    record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=gpu)
    words = [10**10, record.data_ptr(), *[0] * (STATE_WORDS - 2)]  # waits of 10 s
    state = torch.tensor(words, device=device)
    dist.barrier()  # all memory is 0
    numbers = torch.arange(count, dtype=torch.float32)
    for call in range(calls):
        x = (numbers + 1000 * rank + call).to(device)
        out = torch.full((world, count), torch.nan, device=device)
        all_gather[(blocks,)](
            x, out, memory, state, rank, count, blocks, world, block, launch_cooperative_grid=gpu
        )
        expected = numbers + 1000 * torch.arange(world)[:, None] + call
        if not torch.equal(out.cpu(), expected):
            raise RuntimeError(f"call {call} of rank {rank} is wrong; failure record {record.tolist()}")
    print(f"rank {rank}: {calls} calls, {world} x {count} numbers, as expected")
    dist.barrier()  # no rank unmaps memory that a peer still stores into
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
