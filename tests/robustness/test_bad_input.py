"""Bad input on real ranks: a clear error or a kept site, never a hang and never a wrong number."""

import gc
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from autofuse import ops
from autofuse.native_kernels import cpu
from tests.passes.dense import group as everybody
from tests.passes.harness import passes_only
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import MAKERS, integers

Ranks = Callable[[int], RankPool]


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _reduce(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group).relu()


def _all_calls(x: Tensor, group: Any) -> dict[str, Callable[[], Any]]:
    """Every op on matrices of the dtype of x, [2W, 2W]."""
    world = dist.get_world_size()
    experts, rows = x.expand(2, -1, -1), x.view(world, 1, 2, -1)
    bag = torch.arange(2 * world).view(2 * world, 1)
    return {
        "matmul_all_reduce": lambda: ops.matmul_all_reduce(x, x, group=group),
        "matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(x, x, group=group),
        "all_gather_matmul": lambda: ops.all_gather_matmul(x, x, group=group),
        "matmul_all_gather": lambda: ops.matmul_all_gather(x, x, group=group),
        "embedding_bag_all_to_all": lambda: ops.embedding_bag_all_to_all(x, bag, group=group),
        "all_to_all_embedding_bag_backward": lambda: ops.all_to_all_embedding_bag_backward(
            x[:2].repeat(1, world), bag, num_embeddings=[2 * world], dims=[2 * world], group=group
        ),
        "expert_matmul_all_to_all": lambda: ops.expert_matmul_all_to_all(experts, experts, group=group),
        "all_to_all_expert_matmul": lambda: ops.all_to_all_expert_matmul(rows, experts[:1], group=group),
    }


# --- Groups -------------------------------------------------------------------------------------------


def _no_member(rank: int, world: int) -> dict[str, str]:
    group = dist.new_group([0])
    if rank == 0:
        return {}
    return {name: _error(call) for name, call in _all_calls(torch.zeros(2 * world, 2 * world), group).items()}


def _unknown(rank: int, world: int) -> dict[str, str]:
    return {name: _error(call) for name, call in _all_calls(torch.zeros(2 * world, 2 * world), "tp").items()}


def test_a_rank_outside_the_group(ranks: Ranks) -> None:
    errors = ranks(2).run(_no_member)[1]
    assert errors.keys() == MAKERS.keys()
    for op, text in errors.items():
        assert text.startswith(f"ValueError: {op}: this rank is not in the group")


def test_an_unknown_group(ranks: Ranks) -> None:
    for errors in ranks(2).run(_unknown):
        for op, text in errors.items():
            assert text.startswith(f"ValueError: {op}: there is no process group called 'tp'")


def _single(rank: int, world: int) -> list[str]:
    """Groups of one rank: eager, then compiled."""
    groups = [dist.new_group([r]) for r in range(world)]
    x, w = integers(rank, 4, 6), integers(7, 6, 4)
    assert torch.equal(ops.matmul_all_reduce(x, w, group=groups[rank]), x @ w)
    for maker in MAKERS.values():
        case = maker(0, 1, 4, groups[rank].group_name)
        assert torch.equal(case.run(2), (case.exact * 2).float())
    torch._dynamo.reset()
    with autofuse.debug() as report:
        y = torch.compile(_reduce, backend=passes_only())(x, w, groups[rank])
    assert torch.equal(y, (x @ w).relu())
    return [site.reason.value for site in report.kept if site.reason]


def test_groups_of_one_rank(ranks: Ranks) -> None:
    assert ranks(2).run(_single) == [["single_rank"]] * 2


def _destroyed(rank: int, world: int, generated: bool) -> str:
    group = dist.new_group(list(range(world)))
    torch._dynamo.reset()
    compiled = torch.compile(_reduce, backend="autofuse" if generated else passes_only())
    x, w = integers(rank, 4, 6), integers(7, 6, 4)
    name = group.group_name  # dynamo guards on a group, and would see that another is given
    with autofuse.debug() as report:
        compiled(x, w, name)
    assert len(report.fused) == 1
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return _error(lambda: compiled(x, w, name))


@pytest.mark.parametrize("generated", [False, True])
def test_a_group_destroyed_after_compile(ranks: Ranks, generated: bool) -> None:
    for text in ranks(2).run(_destroyed, generated, timeout=120):
        assert re.search(r"process group \w+ is gone: it was destroyed after compile", text), text
        assert "recompile" in text


# --- Dtypes, devices, shapes --------------------------------------------------------------------------


def _dtypes(rank: int, world: int, dtype: torch.dtype) -> dict[str, str]:
    """Eager ops of a dtype without kernels: exact through plain collectives, or the error."""
    found = {}
    n = 2 * world
    x = (integers(3, n, n) * (1 + 1j) if dtype.is_complex else integers(3, n, n)).to(dtype)
    for (name, call), exact in zip(
        _all_calls(x, None).items(), _all_calls(x.to(torch.complex128), None).values(), strict=True
    ):
        found[name] = _error(call)
        if not found[name] and name.startswith(("matmul", "all_gather")):
            assert torch.equal(call().to(torch.complex128), exact()), name
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_dtypes_without_kernels_in_eager(ranks: Ranks, dtype: torch.dtype) -> None:
    for found in ranks(2).run(_dtypes, dtype):
        for op, text in found.items():
            clear = ("dtype", "not implemented for", "scalar type")
            assert not text or any(part in text for part in clear), (op, text)


def _kept(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    torch._dynamo.reset()
    x, w = integers(rank, 4, 6).to(dtype), integers(7, 6, 4).to(dtype)
    with autofuse.debug() as report:
        y = torch.compile(_reduce, backend=passes_only())(x, w, everybody())
    assert torch.equal(y, _reduce(x, w, everybody()))
    return [site.reason.value for site in report.kept if site.reason]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dtypes_without_kernels_compiled(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks(2).run(_kept, dtype) == [["dtype"]] * 2


def _mixed(rank: int, world: int) -> list[str]:
    x, meta = torch.zeros(4, 4), torch.zeros(4, 4, device="meta")
    experts = meta.view(1, 4, 4)
    return [
        _error(call)
        for call in (
            lambda: ops.matmul_all_reduce(x, meta),
            lambda: ops.matmul_reduce_scatter(x, x, torch.zeros(4, device="meta")),
            lambda: ops.all_gather_matmul(x, [x, meta]),
            lambda: ops.embedding_bag_all_to_all([x, meta], [torch.zeros(4, 1, dtype=torch.int64)] * 2),
            lambda: ops.expert_matmul_all_to_all(x.view(1, 4, 4), experts),
            lambda: ops.all_to_all_expert_matmul(x.view(2, 1, 2, 4), experts),
        )
    ]


def test_mixed_devices(ranks: Ranks) -> None:
    for texts in ranks(2).run(_mixed):
        for text in texts:
            assert text.startswith("ValueError: "), texts
            assert "device" in text
            assert "meta" in text


def _shapes(rank: int, world: int) -> list[str]:
    x, three = torch.zeros(5, 4), torch.zeros(1, 5, 4)
    index = torch.zeros(5, 1, dtype=torch.int64)
    return [
        _error(call)
        for call in (
            lambda: ops.matmul_reduce_scatter(x, torch.zeros(4, 4)),
            lambda: ops.matmul_reduce_scatter(x, torch.zeros(4, 3), dim=1),
            lambda: ops.expert_matmul_all_to_all(three, torch.zeros(1, 4, 4)),
            lambda: ops.embedding_bag_all_to_all(x, index),
            lambda: ops.all_to_all_embedding_bag_backward(x, index, num_embeddings=[9], dims=[4]),
            lambda: ops.matmul_all_reduce(x, x),
            lambda: ops.all_gather_matmul(x, x),
            lambda: ops.all_to_all_expert_matmul(three.view(1, 1, 5, 4), torch.zeros(1, 4, 4)),
        )
    ]


def test_uneven_and_unfitting_shapes(ranks: Ranks) -> None:
    for texts in ranks(2).run(_shapes):
        assert all(text.startswith("ValueError: ") for text in texts), texts
        assert all("5" in text or "3" in text for text in texts[:5]), texts


def _afterwards(rank: int, world: int) -> bool:
    case = MAKERS["matmul_all_reduce"](rank, world, 5, everybody().group_name)
    return torch.equal(case.run(1), case.exact.float())


def test_the_group_still_works_after_all_that(ranks: Ranks) -> None:
    """Errors that are found before the ranks meet spoil nothing."""
    pool = ranks(2)
    pool.run(_shapes)
    pool.run(_mixed)
    assert pool.run(_afterwards) == [True, True]


# --- Ranks that disagree ------------------------------------------------------------------------------


def _combine(
    x: Tensor, w: Tensor, ends: Tensor, outputs: Sequence[int], inputs: Sequence[int], group: Any
) -> Tensor:
    y = torch._grouped_mm(x, w, offs=ends)
    return funcol.wait_tensor(funcol.all_to_all_single(y, list(outputs), list(inputs), group))


def _dispatch(
    x: Tensor, w: Tensor, ends: Tensor, outputs: Sequence[int], inputs: Sequence[int], group: Any
) -> Tensor:
    rows = funcol.wait_tensor(funcol.all_to_all_single(x, list(outputs), list(inputs), group))
    return torch._grouped_mm(rows, w, offs=ends)


def _splits(rank: int, world: int, fn: Callable[..., Tensor] | None) -> list[str]:
    """Rank 0 expects a row more of rank 1 than that sends."""
    group = fresh_group()
    inputs = [4, 4]
    outputs = [4, 5] if rank == 0 else [4, 4]
    rows = sum(outputs) if fn is _dispatch else sum(inputs)
    x, w = torch.ones(sum(inputs), 16), torch.ones(2, 16, 16)
    ends = torch.tensor([3, rows], dtype=torch.int32)
    if fn is None:

        def combine() -> Tensor:
            return ops.expert_matmul_all_to_all(
                x, w, offsets=ends, output_splits=outputs, input_splits=inputs, group=group
            )

        return [_error(combine) for _ in range(2)]
    torch._dynamo.reset()
    x, w = x.bfloat16(), w.bfloat16()
    compiled = torch.compile(fn, backend=passes_only())
    with autofuse.debug() as report:
        found = [_error(lambda: compiled(x, w, ends, outputs, inputs, group))]
    assert len(report.fused) == 1, report
    return found


@pytest.mark.parametrize("fn", [None, _combine, _dispatch], ids=["eager", "combine", "dispatch"])
def test_splits_that_disagree(ranks: Ranks, fn: Callable[..., Tensor] | None) -> None:
    for texts in ranks(2).run(_splits, fn, timeout=120):
        assert "rank 1 sends 4 rows to rank 0, which expects 5" in texts[0]
        assert all("rank 1 sends 4 rows" in text for text in texts)


def _other_model(rank: int, world: int) -> str:
    group = fresh_group()
    torch._dynamo.reset()
    n = 8 if rank == 0 else 12
    compiled = torch.compile(_reduce, backend=passes_only())
    return _error(lambda: compiled(torch.zeros(4, 6), torch.zeros(6, n), group))


def _other_order(rank: int, world: int) -> str:
    torch._dynamo.reset()
    compiled = torch.compile(_reduce, backend=passes_only(order="ring" if rank else "direct"))
    group = fresh_group()
    return _error(lambda: compiled(torch.zeros(4, 6), torch.zeros(6, 8), group))


def _other_op(rank: int, world: int) -> str:
    def scatter(x: Tensor, w: Tensor, group: Any) -> Tensor:
        return funcol.reduce_scatter_tensor(x @ w, "sum", 0, group)

    group = fresh_group()
    torch._dynamo.reset()
    compiled = torch.compile(scatter if rank else _reduce, backend=passes_only())
    return _error(lambda: compiled(torch.zeros(4, 6), torch.zeros(6, 8), group))


@pytest.mark.parametrize("fn", [_other_model, _other_order, _other_op])
def test_ranks_that_compile_different_models(ranks: Ranks, fn: Callable[..., str]) -> None:
    for text in ranks(2).run(fn, timeout=120):
        assert "the ranks disagree: rank" in text, text
        ours, theirs = re.findall(r"rank (\d) runs (\w+)", text)
        assert {ours[0], theirs[0]} == {"0", "1"}
        expected = ["matmul_all_reduce", "matmul_reduce_scatter" if fn is _other_op else "matmul_all_reduce"]
        assert sorted((ours[1], theirs[1])) == sorted(expected)


# --- What cannot be seen, or cannot run ---------------------------------------------------------------


def _async(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y = x @ v
    handle = dist.all_reduce(y, async_op=True)
    z = x.sin()
    handle.wait()
    return funcol.all_reduce((y + z) @ w, "sum", everybody())


def _graph_breaks(rank: int, world: int) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, v, w = integers(rank, 4, 6), integers(8, 6, 6), integers(9, 6, 4)
    with autofuse.debug() as report:
        y = torch.compile(_async, backend=passes_only())(x, v, w)
    assert torch.equal(y, _async(x, v, w))
    return report.graph_breaks, [str(site.pattern) for site in report.fused]


def test_graph_breaks_round_a_collective(ranks: Ranks) -> None:
    for breaks, fused in ranks(2).run(_graph_breaks):
        assert any("async_op=True" in text for text in breaks)
        assert fused == ["matmul_all_reduce"]


def _without_library(rank: int, world: int) -> tuple[list[str], bool]:
    """Last of this pool: the library does not come back."""
    torch._dynamo.reset()
    cpu._library, cpu._why_not = None, "install a C++ compiler"
    x, w = integers(rank, 4, 6), integers(9, 6, 4)
    with autofuse.debug() as report:
        y = torch.compile(_reduce, backend=passes_only())(x, w, everybody())
    eager = ops.matmul_all_reduce(x, w).relu()
    return [s.reason.value for s in report.kept if s.reason], torch.equal(y, eager)


def test_without_the_native_library(fresh: Ranks) -> None:
    assert fresh(2).run(_without_library) == [(["no_native_kernels"], True)] * 2


def _across_hosts(rank: int, world: int) -> tuple[list[str], bool]:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    torch._dynamo.reset()
    group = fresh_group()  # it can never share memory afterwards
    x, w = integers(rank, 4, 6), integers(9, 6, 4)
    try:
        with autofuse.debug() as report:
            y = torch.compile(_reduce, backend=passes_only())(x, w, group)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return [s.reason.value for s in report.kept if s.reason], torch.equal(y, _reduce(x, w, group))


def test_a_launcher_with_one_rank_per_host(ranks: Ranks) -> None:
    assert ranks(2).run(_across_hosts) == [(["group_spans_hosts"], True)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "auto"}, "unknown option 'polcy'.*'policy'"),
        ({"policy": "sometimes"}, "policy='sometimes'"),
        ({"patterns": ["matmul_allreduce"]}, "'matmul_allreduce'"),
        ({"epilogue_fuson": True}, "'epilogue_fusion'"),
    ],
)
def test_bad_options_raise_at_compile(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(torch.sin, backend="autofuse", options=options)(torch.zeros(2))
