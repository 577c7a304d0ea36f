"""What the examples share: ranks with a device each, printing on rank 0, comparing with eager, timing."""

import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

Step = Callable[[Any], Tensor]
Splits = list[int] | None


def launch(parser: ArgumentParser, run: Callable[[Namespace, torch.device], None]) -> None:
    """Adds the common arguments, then calls `run(args, device)` on every rank of a new process group.

    Under torchrun this process is a rank already; else it becomes torchrun with `--ranks` ranks on this host.
    Ranks take one GPU each, with nccl, if there are enough; else they share out the cores, with gloo.
    """
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start when not under torchrun")
    parser.add_argument("--steps", type=int, default=6, help="training steps to compare with eager")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant; 0 for none")
    parser.add_argument("--policy", default="auto", help="autofuse's policy: auto, always or never")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set, with a warning
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        os.execv(sys.executable, [sys.executable, *torchrun, f"--nproc-per-node={args.ranks}", *sys.argv])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for libraries that choose a device themselves
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo")
    run(args, device)
    dist.destroy_process_group()


def all_to_all(x: Tensor, output_splits: Splits = None, input_splits: Splits = None) -> Tensor:
    """Sends `input_splits[r]` rows of `x` to rank `r` and gets `output_splits[r]` from it; None: equal parts.

    `x: [sum(input_splits), ...]` gives `[sum(output_splits), ...]`. Gradients travel back. The functional
    collective, since torch 2.11 compiles `dist.all_to_all_single` in an autograd.Function to a zero gradient.
    """
    world = dist.group.WORLD
    assert world is not None
    return all_to_all_single_autograd(x.contiguous(), output_splits, input_splits, world)


def show(text: object) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def compile_each(models: Mapping[str, nn.Module], policy: str) -> dict[str, Callable[..., Any]]:
    """What to call for each of the models `eager`, `inductor` and `autofuse`: named by the backend."""
    return {
        "eager": models["eager"],
        "inductor": torch.compile(models["inductor"], backend="inductor"),
        "autofuse": torch.compile(models["autofuse"], backend="autofuse", options={"policy": policy}),
    }


def train_beside(
    models: Mapping[str, nn.Module],
    steps: Mapping[str, Step],
    batches: Iterable[Any],
    count: int,
    gradient_tolerance: float,
    loss_tolerance: float,
) -> None:
    """Takes `count` steps, `step(batch) -> loss`, with all models, of equal weights.

    Prints the losses of `eager` and `autofuse`. Raises RuntimeError if their gradients of the first step, or
    any losses, do not agree. The other models take the same steps so that a race later does the same work.
    """
    losses: dict[str, list[Tensor]] = {name: [] for name in steps}
    show("step      eager   autofuse")
    for number, batch in zip(range(count), batches, strict=False):
        for name in losses:
            losses[name].append(steps[name](batch))
        show(f"{number:4d}  {losses['eager'][-1]:9.5f}  {losses['autofuse'][-1]:9.5f}")
        if number == 0:
            agree("gradients", gradients(models["autofuse"]), gradients(models["eager"]), gradient_tolerance)
    agree("losses", losses["autofuse"], losses["eager"], loss_tolerance)


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of all parameters; of a DTensor the local part."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]


def agree(what: str, got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Raises RuntimeError unless `max |g - e| <= tolerance * max |e|` for every pair `(g, e)` on this rank.

    torchrun then ends the other ranks, and the script exits with a status other than 0.
    """
    pairs = [(g.double(), e.double()) for g, e in zip(got, expected, strict=True)]
    errors = [((g - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for g, e in pairs if e.numel()]
    # Not `max() > tolerance`: that is false for NaN.
    if not all(error <= tolerance for error in errors):
        raise RuntimeError(
            f"{what} of rank {dist.get_rank()}: relative errors {errors}, allowed {tolerance:.1e}"
        )
    show(f"{what}: {len(errors)} compared, relative error {max(errors):.1e}, allowed {tolerance:.1e}")


def race(title: str, steps: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Times the steps in turn, `rounds` times after one warm-up each, and prints the medians of rank 0."""
    if not rounds:
        return
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            _meet()
            start = time.perf_counter()
            step()
            _meet()
            if number:
                seconds[name].append(time.perf_counter() - start)
    show(f"\n{title}, median of {rounds} in turn")
    fastest = statistics.median(seconds["autofuse"])
    for name in seconds:
        median = statistics.median(seconds[name])
        show(f"  {name:<9} {median * 1e3:9.2f} ms  {median / fastest:5.2f} x autofuse")


def _meet() -> None:
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    dist.barrier()
