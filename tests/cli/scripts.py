"""Scripts as users write them for torchrun; tests write them to a file and have them explained."""

TRAIN = """
import argparse, os, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
import helper

class MLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("nccl", init_method="env://")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, 1], backend="gloo")
    names = [None] * world
    dist.all_gather_object(names, f"rank {rank}")
    print(names[-1], "of", helper.NAME, "hidden", args.hidden)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = torch.compile(parallelize_module(MLP(args.hidden), mesh["tp"], plan), backend="autofuse")
    replica = DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        replica(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(loss.detach())
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

SPAWN = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import autofuse
from torch.distributed import _functional_collectives as funcol

def layer(x, w):
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)

def work(rank, world):
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=rank, world_size=world)
    x, w = torch.ones(4, 8), torch.ones(8, 4, requires_grad=True)
    autofuse.ops.matmul_all_reduce(x, w).sum().backward()
    counts = torch.empty(3, dtype=torch.int64)
    dist.all_to_all_single(counts, torch.ones(3, dtype=torch.int64))
    y = torch.compile(layer)(x, w)
    print("sums", counts.sum().item(), y.sum().item(), w.grad.shape)
    sys.exit(7)

if __name__ == "__main__":
    mp.spawn(work, args=(3,), nprocs=3)
"""

FAILS = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
dist.init_process_group()

@torch.compile(backend="autofuse", options={"policy": "never"})
def layer(x, w):
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)

y = layer(torch.ones(4, 8), torch.ones(8, 4))
raise RuntimeError(f"expected 1, got {y.sum().item()}\\nand more")
"""
