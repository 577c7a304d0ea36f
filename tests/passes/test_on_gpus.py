"""Graphs of tensors on GPUs, traced without one: which sites are fused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autofuse
from autofuse import passes
from autofuse.lowering.gpu import support
from autofuse.lowering.torch_internals import has_grouped_mm
from autofuse.passes import Settings, fuse
from autofuse.passes.matchers.combine import NOT_PERMUTED
from autofuse.passes.reasons import Reason
from autofuse.passes.report import GraphReport, Report

from . import between
from . import experts as experts_of_programs
from .experts import COMBINE, DISPATCH, TOKENS, D, Dropless, FixedCapacity, expert_major
from .harness import fake_group
from .tensor_parallel_experts import Experts

needs_grouped_mm = pytest.mark.skipif(not has_grouped_mm(), reason="this torch has no grouped_mm")

WORLD, LOCAL, DIM, ROWS, POOLING = 4, 3, 8, 11, 2


class Exchange(torch.autograd.Function):
    """`[B, C]` to `[W, b, C]`."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return funcol.all_to_all_single(x, None, None, "0")

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return funcol.all_to_all_single(grad.contiguous(), None, None, "0")


def step(
    first: Tensor, second: Tensor, indices: Tensor, offsets: Tensor, grad: Tensor, sparse: bool = False
) -> tuple[Tensor, ...]:
    pooled = [F.embedding_bag(indices, t, offsets, mode="sum", sparse=sparse) for t in (first, second)]
    y = Exchange.apply(torch.cat(pooled, 1))
    return torch.autograd.grad(y, (first, second), grad)


def moved(graph: fx.Graph) -> fx.Graph:
    """The same graph of tensors on a GPU: without one autograd traces CPUs only."""
    for node in graph.nodes:
        if isinstance(val := node.meta.get("val"), Tensor) and not val.is_sparse:
            with val.fake_mode:  # type: ignore[attr-defined]
                shape, stride = val.shape, val.stride()
                node.meta["val"] = torch.empty_strided(shape, stride, dtype=val.dtype, device="cuda")
    return graph


def report_of(dtype: torch.dtype, sparse: bool) -> GraphReport:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        bags = WORLD * LOCAL
        tables = [torch.empty(ROWS, DIM, dtype=dtype, requires_grad=True) for _ in range(2)]
        indices = torch.empty(bags * POOLING, dtype=torch.int64)
        offsets = torch.empty(bags, dtype=torch.int64)
        grad = torch.empty(bags, 2 * DIM, dtype=dtype)
        graph = moved(make_fx(partial(step, sparse=sparse))(*tables, indices, offsets, grad).graph)
        return fuse(graph, Settings(policy="always"), "joint", "0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_exchanges_of_a_training_step_are_fused(dtype: torch.dtype) -> None:
    report = report_of(dtype, sparse=False)
    assert [site.op for site in report.sites] == [
        "autofuse::embedding_bag_all_to_all",
        "autofuse::all_to_all_embedding_bag_backward",
    ], report.sites


def test_sparse_gradients_are_left_to_torch() -> None:
    with autofuse.debug():
        forward, backward = report_of(torch.float32, sparse=True).sites
    assert forward.op == "autofuse::embedding_bag_all_to_all"
    assert backward.op == "autofuse::all_to_all_embedding_bag_backward"
    assert backward.detail == "torch computes what 2 of 2 tables make of it"


SENT, RECEIVED = [3, 0, 5, 8], [2, 4, 4, 6]
"""Rows to and from every rank."""


def experts(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    """Rows arrive, are brought into `order`, and return."""
    rows = funcol.all_to_all_single(x, RECEIVED, SENT, "0")
    hidden = torch._grouped_mm(rows[order], w1, offs=ends).relu()
    back = x.new_empty(sum(RECEIVED), 16).index_put((order,), torch._grouped_mm(hidden, w2, offs=ends))
    return funcol.all_to_all_single(back, SENT, RECEIVED, "0")


@needs_grouped_mm
@pytest.mark.parametrize("sorts", [True, False])
def test_dropless_experts_are_fused_where_rows_are_permuted(sorts: bool) -> None:
    """An index that is given may name a row twice, or none."""

    def layer(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor, keys: Tensor) -> Tensor:
        return experts(x, w1, w2, ends, keys.argsort(stable=True) if sorts else keys)

    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        x = torch.empty(sum(SENT), 16, dtype=torch.bfloat16)
        w1, w2 = (torch.empty(LOCAL, 16, 16, dtype=torch.bfloat16) for _ in range(2))
        ends = torch.empty(LOCAL, dtype=torch.int32)
        keys = torch.empty(sum(RECEIVED), dtype=torch.int64)
        graph = moved(make_fx(layer)(x, w1, w2, ends, keys).graph)
        report = fuse(graph, Settings(policy="always"), "forward", "0")
    if sorts:
        assert [site.op for site in report.sites] == [
            "autofuse::all_to_all_expert_matmul",
            "autofuse::expert_matmul_all_to_all",
        ], report.sites
    else:
        assert [site.detail for site in report.sites] == [NOT_PERMUTED] * 2, report.sites


def gated_experts(
    x: Tensor, w: Tensor, v: Tensor, w2: Tensor, ends: Tensor, keys: Tensor, reads: str
) -> tuple[Tensor, ...]:
    """Gated experts in any order of the products, or with one of them read elsewhere, too."""
    order = keys.argsort(stable=True)
    rows = funcol.all_to_all_single(x, RECEIVED, SENT, "0")[order]
    first, second = (torch._grouped_mm(rows, wi, offs=ends) for wi in (w, v))
    if reads == "second":
        first, second = second, first
    gate = first.float()
    gate = (gate / (1 + (-gate).exp())).to(first.dtype)
    hidden = second * gate if reads == "swapped" else gate * second
    back = x.new_empty(sum(RECEIVED), 16).index_put((order,), torch._grouped_mm(hidden, w2, offs=ends))
    returned = funcol.all_to_all_single(back, SENT, RECEIVED, "0")
    return (returned, *{"gate": (first,), "other": (second,), "silu": (gate,)}.get(reads, ()))


@needs_grouped_mm
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("reads", ["", "swapped", "second", "gate", "other", "silu", "layouts"])
def test_a_gate_is_applied_by_the_kernel(reads: str, device: str) -> None:
    """Where a product is read elsewhere, as in training, both are outputs, too."""
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        x = torch.empty(sum(SENT), 16, dtype=torch.bfloat16)
        w, v, w2 = (torch.empty(LOCAL, 16, 16, dtype=torch.bfloat16) for _ in range(3))
        if reads == "layouts":
            v = v.transpose(1, 2)
        ends = torch.empty(LOCAL, dtype=torch.int32)
        keys = torch.empty(sum(RECEIVED), dtype=torch.int64)
        graph = make_fx(partial(gated_experts, reads=reads))(x, w, v, w2, ends, keys).graph
        if device == "cuda":
            graph = moved(graph)
        fuse(graph, Settings(policy="always"), "forward", "0")
        op = torch.ops.autofuse.all_to_all_expert_matmul.default
        (fused,) = graph.find_nodes(op="call_function", target=op)
    (_, weights, _, gate, *_) = fused.args
    kept = reads in ("gate", "other")
    applied = device == "cuda" and reads not in ("silu", "layouts")
    assert gate == (("silu; products" if kept else "silu") if applied else "")
    assert [n.name for n in weights] == ["arg1_1", "arg2_1"][:: -1 if gate and reads == "second" else 1]
    assert bool(graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)) is not bool(gate)
    read = {"gate": [0, 1], "other": [0, 2]}.get(reads, [0]) if applied else [0, 1]
    assert sorted(item.args[1] for item in fused.users) == read


# --- Both graphs of a training step ---------------------------------------------------------------------


def explained(build: Callable[[], Callable[..., Any]], *args: Tensor) -> Report:
    """The report of a training step of tensors on GPUs."""

    def fuse_moved(graph: fx.Graph, *rest: Any) -> GraphReport:
        *known, basis = rest
        return fuse(moved(graph), *known, basis=basis)

    with (
        fake_group(WORLD),
        patch.object(support, "why_not", lambda device: None),
        patch.object(passes, "fuse_or_keep", fuse_moved),
        autofuse.config.patch(policy="always"),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        return autofuse.explain(build(), backward=True)(*args)


def tokens() -> Tensor:
    return torch.zeros(TOKENS, D, dtype=torch.bfloat16, requires_grad=True)


def fused_calls(report: Report) -> str:
    """The fused ops of the backward graph; `_` is what they read. Without the lines where they are called."""
    (graph,) = (g for g in report.graphs if g.kind == "backward")
    calls = (line.partition(" = autofuse.")[2] for line in str(graph.after).splitlines())
    placeless = (re.sub(r", '[^']*\.py:\d+'", "", call) for call in calls if call)
    unnamed = (re.sub(r"(?<=[(\[ ])[a-z_]\w*", "_", call) for call in placeless)
    return "\n".join(call.replace("[_, _, _, _]", "[..]") for call in unnamed)


@pytest.mark.parametrize(
    "build",
    [
        lambda: FixedCapacity("bmm").bfloat16(),
        lambda: FixedCapacity("gated").bfloat16(),
        pytest.param(lambda: Dropless(sorts=True), marks=needs_grouped_mm),
        pytest.param(lambda: Dropless(wide=True), marks=needs_grouped_mm),
    ],
    ids=["fixed capacity", "fixed capacity, gated", "dropless", "dropless, exchanged in float32"],
)
def test_both_graphs_of_a_layer_of_experts_are_fused(build: Callable[[], Callable[..., Any]]) -> None:
    report = explained(build, tokens())
    found = [(site.graph.split()[0], site.op) for site in report.fused]
    ops = f"autofuse::{DISPATCH}", f"autofuse::{COMBINE}"
    assert found == [(kind, op) for kind in ("forward", "backward") for op in ops], report
    assert {site.reason for site in report.kept} <= {Reason.NO_COMPUTE}, report  # counts of tokens


def test_the_gradient_of_two_projections_is_a_sum_that_is_sent() -> None:
    """The dispatch returns X, too, for the gradients of weights."""
    assert_expected_inline(
        fused_calls(explained(lambda: FixedCapacity("gated").bfloat16(), tokens())),
        """\
all_to_all_expert_matmul(_, [_], [], '', 0, None, None, [], [], 1, 1, True, '0', 'direct')
expert_matmul_all_to_all([_, _], [_, _], [], [], 'mm', 0, None, None, [], [], 1, 1, False, '0', 'direct')""",
    )


class Projections(nn.Module):
    """Sequence parallel: q, k and v, or more, of different widths, of one gathered input."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(D, width, bias=False, dtype=torch.bfloat16) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor_autograd(x, 0, "0")
        return torch.cat([layer(whole) for layer in self.each], 1).relu()


def test_the_gradient_of_projections_of_one_gather_is_one_reduction() -> None:
    """A sum of three matmuls; each has an inner length of its own."""
    assert_expected_inline(
        fused_calls(explained(lambda: Projections(64, 16, 16), tokens())),
        """\
matmul_reduce_scatter([_, _, _], [_, _, _], [], 'mm', 'sum', 0, 1, False, [], '', '', '0', 'direct')""",
    )


def test_a_reduction_of_more_terms_than_kernels_multiply() -> None:
    report = explained(lambda: Projections(16, 16, 16, 16, 16), tokens())
    assert [site.op for site in report.fused if site.graph.startswith("backward")] == [
        "autofuse::matmul_reduce_scatter"
    ]


@needs_grouped_mm
@pytest.mark.parametrize("sorts", [True, False])
def test_the_gradient_of_dropless_projections(sorts: bool) -> None:
    """Rows move where the forward graph has sorted them to, or has counted that they belong."""
    assert_expected_inline(
        fused_calls(explained(lambda: Dropless(sorts=sorts), tokens())),
        """\
all_to_all_expert_matmul(_, [_], [], '', 0, _, _, [..], [..], 1, 1, True, '0', 'direct')
expert_matmul_all_to_all([_, _], [_, _], [], [], 'mm', 0, _, _, [..], [..], 1, 1, False, '0', 'direct')""",
    )


@needs_grouped_mm
def test_indices_that_are_no_permutation_are_none_in_the_backward_either() -> None:
    """Places that nothing but their values says are one."""

    def rounded(rows: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, places, sizes = expert_major(rows, *rest)
        places = places.double().long()
        return rows[places], places, sizes

    with patch.object(experts_of_programs, "expert_major", rounded):
        report = explained(Dropless, tokens())
    kept = [site.detail for site in report.kept if site.reason is Reason.NO_KERNEL_FOR_DEVICE]
    assert kept == [NOT_PERMUTED] * 4


def logits(x: Tensor, w: Tensor, b: Tensor, how: str) -> Tensor:
    y = F.linear(x, w, b) if how != "scaled" else F.linear(x, w) * 0.5
    whole = funcol.wait_tensor(funcol.all_gather_tensor(y, 0, "0"))
    return torch.cat(whole.chunk(WORLD), 1 if how != "rows" else 0)


@pytest.mark.parametrize(
    ("how", "dtype", "why"),
    [
        ("columns", torch.bfloat16, ""),
        ("rows", torch.float16, ""),
        ("columns", torch.float32, "float32 is exchanged; GPU kernels take bfloat16 and float16"),
        ("scaled", torch.bfloat16, "GPU kernels gather one matmul with or without a bias, not 'mm; mul 0.5'"),
    ],
)
def test_logits(how: str, dtype: torch.dtype, why: str) -> None:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        x, w, b = (torch.empty(shape, dtype=dtype) for shape in ((8, 16), (32, 16), (32,)))
        graph = moved(make_fx(partial(logits, how=how))(x, w, b).graph)
        (site,) = fuse(graph, Settings(policy="always"), "inference", "0").sites
    assert site.pattern == "matmul_all_gather"
    assert site.fused == (not why), site
    assert site.detail.startswith(why)


def reduced(x: Tensor, w: Tensor, b: Tensor, how: str) -> Tensor | tuple[Tensor, Tensor]:
    y = F.linear(x, w) * 0.5 if "scaled" in how else torch.addmm(b, x, w.t())
    if how in ("cast", "double"):
        y = y.to(torch.float32 if how == "cast" else torch.float64)
    if how.startswith("columns"):
        return funcol.reduce_scatter_tensor(torch.cat(y.chunk(WORLD, 1)), "sum", 0, "0")
    if how == "scattered":
        return funcol.reduce_scatter_tensor(y, "sum", 0, "0")
    total = funcol.all_reduce(y * x[:, :1] if how == "read before a stage" else y, "sum", "0")
    return (total, y) if how.startswith("read") else total


@pytest.mark.parametrize(
    ("how", "bias", "why"),
    [
        ("everywhere", (32,), ""),
        ("scattered", (1, 32), ""),
        ("everywhere", (8, 32), ""),
        ("scaled", (32,), ""),
        ("cast", (32,), ""),
        ("read elsewhere", (32,), ""),
        ("read before a stage", (32,), ""),
        ("columns", (32,), ""),
        (
            "columns scaled",
            (32,),
            "GPU kernels scatter columns of matmuls with a bias or none, and else whole",
        ),
        ("double", (32,), "float64 is exchanged"),
    ],
)
def test_stages_before_a_reduction(how: str, bias: tuple[int, ...], why: str) -> None:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        x, w, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 16), (32, 16), bias))
        graph = moved(make_fx(partial(reduced, how=how))(x, w, b).graph)
        (site,) = fuse(graph, Settings(policy="always"), "inference", "0").sites
    assert site.fused == (not why), site
    assert site.detail.startswith(why)


@pytest.mark.parametrize(
    ("program", "shapes", "ops"),
    [
        (between.two, ((8, 16), (32, 16), (64, 16)), ["all_gather_matmul", "matmul_reduce_scatter"]),
        (between.one, ((8, 4096), (64, 4096)), ["all_gather_matmul", None]),
        (between.one, ((8, 64), (4096, 64)), [None, "matmul_reduce_scatter"]),
    ],
    ids=["the gather has another", "more is gathered", "more is reduced"],
)
def test_a_matmul_between_two_collectives(
    program: Callable[..., Any], shapes: tuple[tuple[int, int], ...], ops: list[str | None]
) -> None:
    """Both are fused where the gather has another matmul; else the one that gains more."""
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        graph = moved(make_fx(program)(*(torch.empty(s, dtype=torch.bfloat16) for s in shapes)).graph)
        found = fuse(graph, Settings(policy="auto"), "inference", "0").sites
    assert [site.op and site.op.removeprefix("autofuse::") for site in found] == ops, found


def residual_and_norm(x: Tensor, w: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + funcol.all_reduce(x @ w, "sum", "0")
    return F.rms_norm(h, (h.shape[1],), gamma, 0.5), h


@pytest.mark.parametrize(
    ("columns", "schedule", "form", "end"),
    [
        (16, "every", "every", ""),
        (16, "owner", "every", ""),  # nothing proves that the operands are replicated
        (16, "auto", "every", ""),
        (12, "every", "", "GPU kernels apply tails to rows of a multiple of 8 and at most 16384 values"),
    ],
)
def test_tails_behind_reductions(columns: int, schedule: str, form: str, end: str) -> None:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        shapes = (4, 8), (8, columns), (4, columns), (columns,)
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        decomposed = make_fx(residual_and_norm, select_decomp_table())(*tensors)
        graph = moved(make_fx(torch.func.functionalize(decomposed))(*tensors).graph)
        settings = Settings(policy="always", schedule=schedule)
        with autofuse.debug():
            (site,) = fuse(graph, settings, "inference", "0").sites
    assert (site.tail_form, site.tail_end if end else "") == (form, end)
    assert site.tail.startswith("add %0; keep; to float32; rms 0.5; mul %1") == bool(form)


@needs_grouped_mm
@pytest.mark.parametrize(
    ("how", "dtype", "detail"),
    [
        ("sum", torch.bfloat16, ""),
        ("every", torch.float16, ""),
        ("matrices and vectors", torch.bfloat16, ""),
        ("index_add", torch.bfloat16, "not 'grouped %0; mul %1; to bfloat16; index_add %2 %3'"),
    ],
)
def test_experts_of_which_each_rank_has_a_part(how: str, dtype: torch.dtype, detail: str) -> None:
    model = Experts(how).to(dtype)
    with fake_group(WORLD), FakeTensorMode() as mode, patch.object(support, "why_not", lambda device: None):
        faked = {name: mode.from_tensor(p) for name, p in model.named_parameters()}

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = torch.func.functional_call(model, faked, (x,))
            return found

        graph = make_fx(run)(torch.zeros(TOKENS, D, dtype=dtype)).graph
        (site,) = fuse(moved(graph), Settings("always"), "inference", "0").sites
    assert site.fused == (not detail), site.detail
    assert site.detail.endswith(detail) or site.fused
