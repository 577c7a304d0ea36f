"""What autofuse adds to a compilation: forward and backward of the tensor-parallel Llama, from a cold cache.

    python examples/compile_time.py --layers 32

Prints the seconds that stock Inductor takes for the two graphs, and those that autofuse's passes add.
"""

from argparse import ArgumentParser, Namespace

import torch
from common import launch, show
from llama_tp import make_batches, make_model
from torch._inductor.utils import fresh_cache

import autofuse


def compile_once(backend: str, args: Namespace, device: torch.device) -> tuple[float, autofuse.Report]:
    """Seconds that Inductor spent on the forward and the backward graph, and what autofuse did in them."""
    torch._dynamo.reset()
    torch._dynamo.utils.compilation_time_metrics.clear()
    tokens = next(make_batches(args, device))
    call = torch.compile(make_model(args, device), backend=backend)
    with fresh_cache(), autofuse.debug() as report:
        call(tokens, labels=tokens).loss.backward()
    return sum(torch._dynamo.utils.compilation_time_metrics["compile_fx_inner"]), report


def run(args: Namespace, device: torch.device) -> None:
    torch._dynamo.config.recompile_limit = 64
    inductor, _ = compile_once("inductor", args, device)
    _, report = compile_once("autofuse", args, device)
    passes = sum(graph.seconds for graph in report.graphs)
    show(
        f"{args.layers} layers: Inductor {inductor:.1f} s; passes {passes:.2f} s ({passes / inductor:.2%}) "
        f"for {len(report.fused)} fused and {len(report.kept)} kept collectives"
    )


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64 * ranks")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    launch(parser, run)
