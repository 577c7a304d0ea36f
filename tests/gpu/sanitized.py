"""A rank of two for compute-sanitizer: every fused way, at small sizes."""

import os

import torch
import torch.distributed as dist

from autofuse.lowering.gpu import by_name
from tests.gpu.on_gpus import MOST_ERROR, error_of

SIZES = {  # m, k, n
    "matmul_all_reduce": [(4, 264, 520), (72, 264, 4360), (520, 264, 520)],
    "matmul_reduce_scatter": [(8, 264, 520), (40, 264, 4360), (520, 264, 520)],
    "all_gather_matmul": [(8, 1032, 520), (520, 264, 520)],
}


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    # Not NCCL, whose kernels the sanitizer would look at, too.
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    group = dist.group.WORLD.group_name
    for op, sizes in SIZES.items():
        for m, k, n in sizes:
            torch.manual_seed(rank)
            gathers = op == "all_gather_matmul"
            x = torch.randn(m // world if gathers else m, k, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
            parts = [torch.empty_like(x, device="cpu") for _ in range(world)]
            dist.all_gather(parts, x.cpu())
            weights = [torch.empty_like(w, device="cpu") for _ in range(world)]
            dist.all_gather(weights, w.cpu())
            if gathers:
                wanted = torch.cat(parts).double() @ w.cpu().double()
            else:
                products = [(a.double() @ b.double()).bfloat16() for a, b in zip(parts, weights, strict=True)]
                wanted = sum(p.double() for p in products)  # type: ignore[assignment]
                if op == "matmul_reduce_scatter":
                    wanted = wanted.chunk(world)[rank]
            for name in by_name.names(op, m, k, n, x.dtype, world):
                for _ in range(2):
                    found = by_name.run(name, op, x, w, group)
                torch.cuda.synchronize()
                error = error_of(found.cpu(), wanted)
                assert error < MOST_ERROR, (name, error)
                if rank == 0:
                    print(f"{op} [{m}, {k}] @ [{k}, {n}] {name}: {error:.1e}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # freeing symmetric memory under the sanitizer takes long
