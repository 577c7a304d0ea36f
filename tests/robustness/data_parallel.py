"""Tensor parallelism inside of FSDP2 or DDP, on (W / 2) x 2 ranks: losses with and without autofuse.

The fused ops are of the groups of two ranks; FSDP2 and DDP run their collectives for the other groups, on
GPUs on streams of their own beside the fused ops.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

import autofuse

LAYERS, ROWS = 2, 8
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _losses(mesh: DeviceMesh, wrapper: str, compiled: bool, steps: int, width: int) -> list[float]:
    torch.manual_seed(0)
    device = mesh.device_type
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # GPU kernels take no float32
    model = nn.Sequential(*(Block(width) for _ in range(LAYERS))).to(device, dtype)
    for block in model:
        parallelize_module(block, mesh["tp"], PLAN)
        if compiled:
            block.compile(backend="autofuse")
    call: nn.Module = model
    if wrapper == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    else:
        _pre_dp_module_transform(model)
        call = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
        x = torch.randn(ROWS, width, generator=generator).to(device, dtype)
        loss = (call(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def train(
    rank: int, world: int, wrapper: str, steps: int, device: str, width: int
) -> tuple[list[float], list[float], int]:
    """Losses of eager steps and of compiled ones, and how many sites were fused."""
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    eager = _losses(mesh, wrapper, False, steps, width)
    with autofuse.config.patch(policy="always"), autofuse.debug() as report:
        compiled = _losses(mesh, wrapper, True, steps, width)
    return eager, compiled, len(report.fused)
