"""Every reason for keeping a site can be provoked from user code, and explain says what is wrong.

reason                provoked by (here unless a file is named)
no_native_kernels     test_without_native_kernels; numbers: test_bad_input.py
no_kernel_for_device  test_every_reason "meta tensors"
group_spans_hosts     test_a_group_that_spans_hosts
group_unknown         test_every_reason "no such group", test_a_group_that_is_an_input_of_the_graph
single_rank           test_a_group_of_one_rank
reduce_op             test_every_reason "max", "min", "product"
dtype                 test_every_reason "float64" and others, of every op
mixed_devices         test_mixed_devices
no_compute            test_every_reason "broadcast", "no matmul", "batch of matmuls", "gathered bias"
layout                test_every_reason "matmul that is broadcast", "padded product"
extra_users           test_every_reason "read inside", "gathered twice"
uneven                test_every_reason "uneven rows", "uneven parts"
unsupported_variant   test_every_reason "alpha", "max pooling"; test_a_ring_that_is_too_long
policy_never          test_policy
pattern_disabled      test_patterns
not_profitable        test_policy
pass_failed           tests/passes/test_safely.py; numbers: test_kept.py
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.native_kernels import cpu
from autofuse.passes.choice.device_table import shipped
from tests.passes.dense import group
from tests.passes.harness import fake_group

WORLD = 4
c10d = torch.ops._c10d_functional


def exchange(x: Tensor) -> Tensor:
    if x.requires_grad:
        equal = [x.shape[0] // WORLD] * WORLD
        return funcol.all_to_all_single_autograd(x, equal, equal, group())
    return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, group()))


def reduced(x: Tensor, w: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x @ w, op, group())


def scattered(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x @ w, "sum", 0, group())


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor(x, dim, group())


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return gather(x) @ w


def pooled(table: Tensor, indices: Tensor) -> Tensor:
    return exchange(F.embedding_bag(indices, table, mode="sum"))


def combined(x: Tensor, w: Tensor) -> Tensor:
    return exchange((x @ w).view(2, WORLD, 3, -1).transpose(0, 1).contiguous())


def dispatched(x: Tensor, w: Tensor) -> Tensor:
    return exchange(x).transpose(0, 1).reshape(2, 3 * WORLD, -1) @ w


def scattered_unchecked(x: Tensor, w: Tensor) -> Tensor:
    """Without the check of the Python wrapper."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w, "sum", WORLD, group().group_name))


def combined_unevenly(x: Tensor, w: Tensor) -> Tensor:
    """The program cuts the rows of its experts into equal parts, but sends others."""
    splits = [5, 6, 7, 6]
    parts = (x @ w).view(2, WORLD, 3, -1).transpose(0, 1).reshape(24, -1)
    return funcol.wait_tensor(funcol.all_to_all_single(parts, splits, splits, group()))


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def matmul(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    return ones(8, 16, dtype=dtype, device=device), ones(16, 8, dtype=dtype, device=device)


def bags(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    return ones(50, 8, dtype=dtype).requires_grad_(grad), torch.arange(16 * 3).view(16, 3)


def experts(rows: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return ones(*rows, 16, dtype=dtype), ones(2, 16, 8, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    reason: str
    detail: str
    backward: bool = False


F64 = torch.float64
CASES = {
    "meta tensors": Case(reduced, lambda: matmul(device="meta"), "no_kernel_for_device", "meta"),
    "no such group": Case(
        lambda x, w: c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", "tp")),
        matmul,
        "group_unknown",
        "no group 'tp'",
    ),
    "max": Case(lambda x, w: reduced(x, w, "max"), matmul, "reduce_op", "'max'"),
    "min": Case(lambda x, w: reduced(x, w, "min"), matmul, "reduce_op", "'min'"),
    "product": Case(lambda x, w: reduced(x, w, "product"), matmul, "reduce_op", "'product'"),
    "float64": Case(reduced, lambda: matmul(F64), "dtype", "float64"),
    "int64": Case(reduced, lambda: matmul(torch.int64), "dtype", "int64"),
    "complex64": Case(reduced, lambda: matmul(torch.complex64), "dtype", "complex64"),
    "float64, scattered": Case(scattered, lambda: matmul(F64), "dtype", "float64"),
    "float64, gathered": Case(gathered, lambda: matmul(F64), "dtype", "float64"),
    "int64, gathered": Case(gathered, lambda: matmul(torch.int64), "dtype", "int64"),
    "float64, bags": Case(pooled, lambda: bags(F64), "dtype", "float64"),
    "float64, bags, backward": Case(pooled, lambda: bags(F64, grad=True), "dtype", "float64", True),
    "float64, combine": Case(combined, lambda: experts((2, 12), F64), "dtype", "float64"),
    "float64, dispatch": Case(dispatched, lambda: experts((4, 2, 3), F64), "dtype", "float64"),
    "broadcast": Case(lambda x, w: funcol.broadcast(x @ w, 0, group()), matmul, "no_compute", "broadcast"),
    "no matmul": Case(
        lambda x, w: funcol.all_reduce(x + w.t(), "sum", group()), matmul, "no_compute", "no matmul"
    ),
    "batch of matmuls": Case(
        lambda x, w: gather(x, 1) @ w, lambda: experts((2, 12), torch.float32), "no_compute", "bmm is a batch"
    ),
    "gathered bias": Case(
        lambda x, w: torch.addmm(gather(x[:2, :8]), x, w), matmul, "no_compute", "addmm reads the gathered"
    ),
    "gathered twice": Case(
        lambda x, w: (g := gather(x[:4])) @ g, matmul, "extra_users", "both operands of mm are gathered"
    ),
    "matmul that is broadcast": Case(
        lambda x, w: funcol.all_reduce((x @ w) + w[:2].view(2, 1, 8), "sum", group()),
        matmul,
        "layout",
        "broadcasts the matmul",
    ),
    "padded product": Case(
        lambda x, w: funcol.reduce_scatter_tensor(F.pad(x[:7] @ w, (0, 0, 0, 1)), "sum", 0, group()),
        matmul,
        "layout",
        "constant_pad_nd is no list",
    ),
    "read inside": Case(
        lambda x, w: funcol.all_reduce((y := x @ w) * y.sin(), "sum", group()),
        matmul,
        "extra_users",
        "the operand sin depends on the matmul",
    ),
    "uneven rows": Case(
        scattered_unchecked,
        lambda: (ones(7, 16), ones(16, 8)),
        "uneven",
        "dim 0 of size 7 has no 4 equal parts",
    ),
    "uneven parts": Case(combined_unevenly, lambda: experts((2, 12), torch.float32), "uneven", "uneven"),
    "alpha": Case(
        lambda x, w: funcol.all_reduce(torch.add(x @ w, w[0], alpha=2), "sum", group()),
        matmul,
        "unsupported_variant",
        "alpha",
    ),
    "max pooling": Case(
        lambda t, i: funcol.all_reduce(F.embedding_bag(i, t, mode="max"), "sum", group()),
        lambda: bags(grad=True),
        "unsupported_variant",
        "max pooling",
    ),
}


def explain(case: Case, world: int = WORLD, **changes: Any) -> autofuse.Report:
    with fake_group(world), autofuse.config.patch(**{"policy": "always", **changes}):
        return autofuse.explain(case.fn, backward=case.backward)(*case.args())


def only(report: autofuse.Report) -> autofuse.Site:
    (site,) = report.sites
    return site


@pytest.mark.parametrize("name", CASES)
def test_every_reason(name: str) -> None:
    case = CASES[name]
    report = explain(case)
    assert report.sites
    for site in report.sites:
        assert not site.fused
        assert site.op is None
        assert site.reason is not None
        assert site.reason.value == case.reason, report
        assert case.detail in site.detail
        assert site.reason.advice in str(report)


PLAIN = Case(reduced, matmul, "", "")


def test_without_the_reason_it_is_fused() -> None:
    assert only(explain(PLAIN)).fused


def test_a_matmul_that_has_been_taken() -> None:
    first, second = explain(Case(lambda x, w: gather(gathered(x, w)), matmul, "", "")).sites
    assert first.fused
    assert second.reason is autofuse.Reason.NO_COMPUTE
    assert second.pattern == "matmul_all_gather"
    assert second.detail.endswith("is part of autofuse.all_gather_matmul.default already")
    # What a collective made of a product is none.
    _, second = explain(Case(lambda x, w: gather(scattered(x, w)), matmul, "", "")).sites
    assert second.reason is autofuse.Reason.NO_COMPUTE
    assert second.detail == "no matmul reads the gathered tensor"


def test_a_ring_that_is_too_long() -> None:
    for world, fused in ((33, True), (34, False)):
        site = only(explain(PLAIN, world, order="ring"))
        assert site.fused == fused
    assert site.reason is autofuse.Reason.UNSUPPORTED_VARIANT
    assert "a ring of 34 ranks" in site.detail
    assert only(explain(PLAIN, world)).fused


def test_a_group_of_one_rank() -> None:
    assert only(explain(PLAIN, world=1)).reason is autofuse.Reason.SINGLE_RANK


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", None)
    monkeypatch.setattr(cpu, "_why_not", "install a compiler")
    site = only(explain(PLAIN))
    assert (site.reason, site.detail) == (autofuse.Reason.NO_NATIVE_KERNELS, "install a compiler")


def test_a_group_that_spans_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert only(explain(PLAIN)).reason is autofuse.Reason.GROUP_SPANS_HOSTS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(WORLD))
    assert only(explain(PLAIN)).fused


def test_patterns() -> None:
    site = only(explain(PLAIN, patterns="all_gather_matmul"))
    assert site.reason is autofuse.Reason.PATTERN_DISABLED
    assert only(explain(PLAIN, patterns="all_gather_matmul,matmul_all_reduce")).fused
    assert site.pattern in FUSED_OPS


def test_policy(tmp_path: Path) -> None:
    assert only(explain(PLAIN, policy="never")).reason is autofuse.Reason.POLICY_NEVER
    (cpu,) = (table for table in shipped() if table.device == "cpu")
    slow = dataclasses.replace(cpu, constants={**cpu.constants, "link.2.remote": 1e-3, "link.4.remote": 1e-3})
    (tmp_path / "slow.json").write_text(slow.to_json())
    site = only(explain(PLAIN, policy="auto", table=str(tmp_path / "slow.json")))
    assert site.reason is autofuse.Reason.NOT_PROFITABLE
    assert site.prediction is not None
    assert site.prediction.fused_us is not None
    assert site.prediction.unfused_us is not None
    assert site.prediction.fused_us > site.prediction.unfused_us
    assert only(explain(PLAIN, policy="always")).fused


def traced() -> fx.GraphModule:
    gm = make_fx(lambda x, w: reduced(x, w), tracing_mode="fake")(*matmul())
    assert isinstance(gm, fx.GraphModule)
    return gm


def test_mixed_devices() -> None:
    """In a graph of one's own: torch itself raises when a matmul mixes devices."""
    with fake_group(WORLD), autofuse.config.patch(policy="always"):
        gm = traced()
        w = [n for n in gm.graph.nodes if n.op == "placeholder"][1]
        w.meta["val"] = w.meta["val"].to("meta")
        site = only(autofuse.rewrite(gm))
    assert site.reason is autofuse.Reason.MIXED_DEVICES
    assert "meta" in site.detail


def test_a_group_that_is_an_input_of_the_graph() -> None:
    with fake_group(WORLD), autofuse.config.patch(policy="always"):
        gm = traced()
        reduce = next(n for n in gm.graph.nodes if n.target is c10d.all_reduce.default)
        with gm.graph.inserting_before(reduce):
            reduce.update_arg(2, gm.graph.placeholder("group"))
        site = only(autofuse.rewrite(gm))
    assert site.reason is autofuse.Reason.GROUP_UNKNOWN
    assert "input of the graph" in site.detail


def test_no_reason_is_left_out() -> None:
    assert __doc__ is not None
    assert {line.split()[0] for line in __doc__.splitlines()[3:] if line.strip()} == {
        reason.value for reason in autofuse.Reason
    }
