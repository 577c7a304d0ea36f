"""A rank of two for compute-sanitizer, at small sizes. Arguments: one of PARTS, most ways of a kernel."""

import os
import sys
from collections.abc import Iterable
from itertools import product

import torch
import torch.distributed as dist

from autofuse.lowering.gpu import by_name
from autofuse.lowering.gpu.choice.kernel import fused_ways, ways_of
from autofuse.lowering.gpu.dense import plain
from autofuse.lowering.gpu.dense.plain import programs
from autofuse.lowering.gpu.dense.ways import DenseProblem
from tests.gpu import (
    backward_on_gpus,
    dropless_on_gpus,
    embedding_on_gpus,
    experts_on_gpus,
    one_gpu_ranks,
    test_bag_sums,
    test_optimizer,
    test_tokens,
    update_on_gpus,
)
from tests.gpu.expected import MOST_ERROR, error_of, group_of_all
from tests.ops.bags import Case as Bags
from tests.ranks import ONE_GPU

SIZES = {  # m, k, n
    "matmul_all_reduce": [(4, 264, 520), (72, 264, 4360), (520, 264, 520)],
    "matmul_reduce_scatter": [(8, 264, 520), (40, 264, 4360), (520, 264, 520)],
    "all_gather_matmul": [(8, 1032, 520), (520, 264, 520)],
    "matmul_all_gather": [(8, 264, 520), (520, 264, 520)],
}


PARTS = (*SIZES, "experts", "bags", "bag_sums", "tokens", "optimizer")
REDUCTIONS = ("matmul_all_reduce", "matmul_reduce_scatter")
most = 0
"""Ways of one kernel that are run at a size; 0: all."""


def main() -> None:
    global most
    part, most = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(0 if ONE_GPU else rank)
    if ONE_GPU:
        one_gpu_ranks.share_gpu()
    # Not NCCL, whose kernels the sanitizer would look at, too.
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    if part == "experts":
        experts(rank, world)
    elif part == "bags":
        bags(rank)
    elif part == "bag_sums":
        cases = (test_bag_sums.Case(op, 34, (64, 8, 136)) for op in REDUCTIONS)
        row_sums(cases, rank, world)
    elif part == "tokens":
        products = product(REDUCTIONS, (test_tokens.TAKEN, test_tokens.ADDED))
        row_sums((test_tokens.Case(op, 34, 136, text) for op, text in products), rank, world)
    elif part == "optimizer":
        kinds = ("buckets", "clipped", "lamb", "lamb_clipped")
        kernels = [*product(kinds, ("", " per_sm=3")), ("packets", "")]
        for (kernel, rest), dtype in product(kernels, (torch.float32, torch.bfloat16)):
            way, clip = kernel + rest, 0.1 if kernel.endswith("clipped") else 0.0
            # Without the caching allocator nothing can be allocated in a graph, as norms and sums are.
            replays = 2 if kernel in ("buckets", "packets") else 0
            test_optimizer.many(rank, world, dtype, 50_000, way, clip, replays)
            report(rank, f"{way} {dtype}", "")
    else:
        dense(part, rank, world)
    dist.barrier()
    if rank == 0:
        print("whole", flush=True)


def some(ways: Iterable[str]) -> list[str]:
    """At most `most` ways of each kernel."""
    kinds, found = list[str](), list[str]()
    for way in ways:
        kinds.append(way.split(" ")[0])
        if not most or kinds.count(kinds[-1]) <= most:
            found.append(way)
    return found


def dense(op: str, rank: int, world: int) -> None:
    group = group_of_all().group_name
    for m, k, n in SIZES[op]:
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
            wanted = torch.stack(products).double().sum(0)
            if op == "matmul_all_gather":
                wanted = torch.cat(products).double()
            if op == "matmul_reduce_scatter":
                wanted = wanted.chunk(world)[rank]
        problem = DenseProblem(op, m, k, n, world, x.dtype, programs())
        ways = [way for way in fused_ways(problem) if not (ONE_GPU and ways_of(problem)[way].is_copied)]
        for name in some(ways):
            for _ in range(2):
                found = plain.run_on(name, op, x, w, group)
            torch.cuda.synchronize()
            error = error_of(found.cpu(), wanted)
            assert error < MOST_ERROR, (name, error)
            if rank == 0:
                print(f"{op} [{m}, {k}] @ [{k}, {n}] {name}: {error:.1e}", flush=True)


def experts(rank: int, world: int) -> None:
    for op, run in product((experts_on_gpus.COMBINE, experts_on_gpus.DISPATCH), (37, 130)):
        case = experts_on_gpus.Case(op, 3, run, 264, 520, biased=True)
        x, w, bias, wanted = case.x(rank, world), case.w(rank), case.bias(rank), case.wanted(rank, world)
        for way in some(experts_on_gpus.fused_ways(case, rank, world)[::4]):
            found = experts_on_gpus.call(way, case, x, w, bias)
            report(rank, f"{op} {run} rows {way}", experts_on_gpus.wrong(found, wanted))
    ragged = dropless_on_gpus.Ragged("random", rows=200, shuffled=True)
    given, sent = ragged.inputs(rank, world), ragged.wanted(rank, world)
    parts, _, arrived = ragged.dispatched(rank, world)
    for way in some(dropless_on_gpus.ways()[::2]):
        found = dropless_on_gpus.call(way, given)
        report(rank, f"dropless combine {way}", experts_on_gpus.wrong(found, sent))
        found = dropless_on_gpus.dispatch(way, parts)[0]
        report(rank, f"dropless dispatch {way}", experts_on_gpus.wrong(found, arrived))


def bags(rank: int) -> None:
    case = Bags(((64, 24), (48,)), b=33, table=torch.bfloat16, wire=torch.bfloat16, weighted=True, padding=1)
    inputs, pooled = embedding_on_gpus.on_device(case, rank), embedding_on_gpus.wanted(case, rank)
    for way in fused(embedding_on_gpus.kernels_of(case)):
        found = embedding_on_gpus.call(way, case, inputs)
        report(rank, f"bags {way}", embedding_on_gpus.check(found, case, pooled))
    grad, wanted = backward_on_gpus.grad_on_device(case, rank), backward_on_gpus.wanted(case, rank)
    for way in fused(backward_on_gpus.kernels_of(case)):
        gradients = backward_on_gpus.call(way, case, inputs, grad)
        report(rank, f"gradients of bags {way}", backward_on_gpus.check(gradients, case, wanted))
    for rowwise in (False, True):
        before = update_on_gpus.Tables.of(case, rank, rowwise)
        for way in fused(update_on_gpus.kernels_of(case))[::2]:
            tables = before.copy()
            tables.call(way, case, grad)
            report(rank, f"update {way}", update_on_gpus.check(tables, before, case, wanted))


def row_sums(cases: Iterable[test_bag_sums.Case | test_tokens.Case], rank: int, world: int) -> None:
    for case in cases:
        given, expected = case.arguments(rank), case.expected(rank, world)
        for way in fused(by_name.names(case.op, given, True)):
            error = error_of(by_name.run(way, case.op, given)[0], expected)
            report(rank, f"{case.op} of {way}", "" if error < MOST_ERROR else f"error {error:.1e}")


def fused(ways: list[str]) -> list[str]:
    return some(way for way in ways if "nccl" not in way)


def report(rank: int, what: str, wrong: str) -> None:
    torch.cuda.synchronize()
    assert not wrong, f"{what}: {wrong}"
    if rank == 0:
        print(what, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # freeing symmetric memory under the sanitizer takes long
