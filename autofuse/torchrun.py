"""The group of commands that torchrun runs on every rank, each with a GPU."""

import os
from collections.abc import Callable
from datetime import timedelta


def join(
    command: str,
    check: Callable[[int], object] | None = None,
    timeout_s: float | None = None,
    device_type: str = "cuda",
) -> None:
    """Join the group of all ranks. ValueError without torchrun or a GPU, or from `check(world)`. CPU ranks
    share out the cores."""
    import torch
    import torch.distributed as dist

    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"this process is no rank of torchrun; start `torchrun --nproc-per-node 4 -m autofuse {command}`"
        )
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if device_type == "cpu":
        if check is not None:
            check(int(os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo", timeout=timeout)
        return
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise ValueError(f"local rank {local} has no GPU: torch finds {gpus}; start as many ranks as GPUs")
    if check is not None:
        check(int(os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timeout)
