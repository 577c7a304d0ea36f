"""Updates behind all_reduces in graphs of tensors on GPUs, traced without one: what is fused, and where the
numbers of a rule are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

import autofuse
from autofuse.lowering.gpu import support
from autofuse.lowering.ops import all_reduce_update
from autofuse.lowering.ops.all_reduce_update import MOST_BUCKETS
from autofuse.lowering.update_rules import NUMBERS, RULES, adam_terms, numbers_at, sgd_terms
from autofuse.passes import Settings, fuse
from autofuse.passes.graph.functional import arguments
from autofuse.passes.matchers import optimizer_update, update_group, update_rule
from autofuse.passes.reasons import Reason
from autofuse.passes.report import GraphReport
from tests.ranks import RankPool

from . import test_optimizer_updates as on_cpus
from .harness import became, fake_group

Ranks = Callable[[int], RankPool]
B1, B2, EPS, DECAY = 0.9, 0.99, 1e-8, 0.1


def adamw(g: Tensor, m: Tensor, v: Tensor, p: Tensor, t: Tensor, lr: Any) -> tuple[Tensor, ...]:
    """What m, v, p and t become; the step, and the rate if it is a tensor, are as capturable optimizers have
    them."""
    g, wide = funcol.all_reduce(g, "avg", "0").float(), p.float()
    t = t + 1
    m, v = torch.lerp(m, g, 1 - B1), B2 * v + (1 - B2) * g * g
    u = (m / (1 - B1**t)) / (torch.sqrt(v / (1 - B2**t)) + EPS)
    return m, v, (wide - lr * (u + DECAY * wide)).to(p.dtype), t


def steps(sizes: Sequence[int], t: str, lr: str, dtype: torch.dtype) -> fx.GraphModule:
    """An update of each of these tensors, with t and lr on these devices; lr is a number if there is none."""
    dtypes = dtype, torch.float32, torch.float32, dtype
    groups = [[torch.empty(n, device="cuda", dtype=each) for each in dtypes] for n in sizes]
    count, rate = torch.empty((), device=t), torch.empty((), device=lr) if lr else 0.1

    def step(groups: list[list[Tensor]], count: Tensor, rate: Any) -> list[Tensor]:
        new: list[Tensor] = []
        for g, m, v, p in groups:
            *of_tensor, after = adamw(g, m, v, p, count, rate)
            new += of_tensor
        return [*new, after]

    if lr:
        gm = make_fx(step, select_decomp_table())(groups, count, rate)
    else:
        gm = make_fx(lambda groups, count: step(groups, count, rate), select_decomp_table())(groups, count)
    # copy_ cannot be traced for GPUs without one; functional graphs end in it.
    given, output = list(gm.graph.find_nodes(op="placeholder")), gm.graph.output_node()
    changed = [node for i in range(len(sizes)) for node in given[4 * i + 1 : 4 * i + 4]]
    with gm.graph.inserting_before(output):
        for old, new in zip([*changed, given[4 * len(sizes)]], output.args[0], strict=True):
            copied = gm.graph.call_function(torch.ops.aten.copy_.default, (old, new))
            copied.meta["val"] = old.meta["val"]
    output.args = ((),)
    return gm


def fused(
    sizes: Sequence[int], t: str = "cuda", lr: str = "cuda", policy: str = "auto", world: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[fx.GraphModule, GraphReport]:  # fmt: skip
    with (
        fake_group(world),
        FakeTensorMode(),
        patch.object(support, "why_not", lambda device: None),
    ):
        gm = steps(sizes, t, lr, dtype)
        return gm, fuse(gm.graph, Settings(policy=policy), "inference", "0")


def _calls(graph: fx.Graph) -> Iterator[dict[str, Any]]:
    for node in graph.nodes:
        if (given := arguments(node) if "auto_functionalized" in str(node.target) else None) is not None:
            yield given


def _above(node: fx.Node) -> set[fx.Node]:
    found, work = set(), [node]
    while work:
        above = work.pop()
        if above not in found:
            found.add(above)
            work += above.all_input_nodes
    return found


@pytest.mark.parametrize(("t", "lr"), [("cuda", "cuda"), ("cuda", ""), ("cpu", "cuda"), ("cpu", "cpu")])
def test_numbers_stay_on_the_gpu(t: str, lr: str) -> None:
    """What the host knows is an argument of a kernel: nothing is copied between devices, nobody waits."""
    gm, report = fused([72], t, lr)
    assert [site.op for site in report.sites] == ["autofuse::all_reduce_update"], report.sites
    (given,) = _calls(gm.graph)
    assert given["numbers"].meta["val"].device.type == "cuda"
    assert given["numbers"].meta["val"].dtype == torch.float32
    for node in _above(given["numbers"]):
        val = node.meta["val"]
        given_there = any(n.op == "placeholder" and n.meta["val"].device.type == "cpu" for n in _above(node))
        assert val.device.type == "cuda" or (not val.dim() and given_there), node.format_node()
        name = str(node.target)
        assert not any(kind in name for kind in ("_to_copy", "device_put", "item", "cat", "scalar_dense")), (
            name
        )


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_too_many_buckets_are_kept(policy: str) -> None:
    _, report = fused([MOST_BUCKETS * 1024 + 1], policy=policy)
    (site,) = report.sites
    assert (site.reason, site.detail) == (Reason.NO_KERNEL_FOR_DEVICE, optimizer_update.TOO_MANY)


@pytest.mark.parametrize(
    ("size", "world", "gains"), [(1 << 10, 2, True), (1 << 14, 8, True), (1 << 18, 8, False)]
)
def test_what_is_not_predicted_to_gain_is_kept(size: int, world: int, gains: bool) -> None:
    """8 ranks send each element to 7 others; the all_reduces of NCCL move it twice."""
    _, report = fused([size], world=world, dtype=torch.bfloat16)
    (site,) = report.sites
    assert site.prediction is not None
    assert site.prediction.fused_us is not None
    assert site.prediction.unfused_us is not None
    assert site.fused == gains == (site.prediction.fused_us < site.prediction.unfused_us)
    assert gains or site.reason is Reason.NOT_PROFITABLE


def test_updates_alike_are_one_op() -> None:
    """Tensors of one rule, with one row of numbers: every tensor has its own nodes for the same rates."""
    gm, report = fused([1000, 40, 2048, 7])
    assert [site.op for site in report.sites] == ["autofuse::all_reduce_update"] * 4, report.sites
    (given,) = _calls(gm.graph)
    assert [g.meta["val"].numel() for g in given["grads"]] == [1000, 40, 2048, 7]
    assert given["rows"] == [0] * 4
    assert given["numbers"].meta["val"].shape == (1, NUMBERS)


def test_one_op_has_as_many_buckets_as_a_kernel_takes() -> None:
    size = MOST_BUCKETS * 1024 // 2
    gm, report = fused([size, 5, size, 9, 3 * size, 11], policy="always")
    found = [[g.meta["val"].numel() for g in given["grads"]] for given in _calls(gm.graph)]
    assert found == [[size, 5], [size, 9, 11]]
    assert [site.fused for site in report.sites] == [True, True, True, True, False, True]


def _in_the_form_of_gpus(rank: int, world: int, name: str) -> list[tuple[Any, str]]:
    with patch.object(update_rule, "_is_host", lambda device: False):
        return on_cpus.check(rank, world, on_cpus.FUSED[name], (31, 65), "", on_cpus._how(False))


@pytest.mark.parametrize("name", ["adamw_of_tensors", "unscaled", "momentum"])
def test_numbers_have_the_values_that_they_have_on_the_host(ranks: Ranks, name: str) -> None:
    found = ranks(2).run(_in_the_form_of_gpus, name, timeout=200)
    assert found == [[(on_cpus.UPDATE, "")]] * 2


def several(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], t: Tensor) -> list[Tensor]:
    """AdamW of the first three; a fourth by another rule; a fifth whose gradient depends on the first; and a
    sum that is read, too."""
    t.add_(1)
    group = dist.group.WORLD
    assert group is not None
    read: list[Tensor] = []
    for i in (0, 1, 2, 4):
        given = g[i] + p[0].sum() if i == 4 else g[i]
        total = funcol.all_reduce(given, "avg", group)
        m[i].lerp_(total, 1 - B1)
        v[i].mul_(B2).addcmul_(total, total, value=1 - B2)
        u = (m[i] / (1 - B1**t)) / ((v[i] / (1 - B2**t)).sqrt() + EPS)
        p[i].sub_(0.1 * (u + DECAY * p[i]))
        if i == 1:
            read.append(total.square().sum())
            p[3].sub_(0.1 * funcol.all_reduce(g[3], "avg", group))
    return read


def _several(rank: int, world: int, generated: bool) -> tuple[list[tuple[Any, str]], list[int]]:
    """Sites, and how many gradients each call of the op has had."""
    torch._dynamo.reset()
    shapes = ((7, 30), (5,), (64, 3), (11,), (2, 2))
    kept, found = [], []
    for state in (kept, found):
        torch.manual_seed(3)
        state += [[torch.rand(shape) for shape in shapes] for _ in range(4)]
        torch.manual_seed(rank)
        state += [torch.zeros(())]
        state[1] = [torch.randn(shape) for shape in shapes]
    calls: list[int] = []
    op = all_reduce_update.run_whole_update

    def counted(args: Any) -> Any:
        calls.append(len(args.grads))
        return op(args)

    with (
        patch.object(update_rule, "_is_host", lambda device: False),
        patch.object(update_group, "_is_on_gpu", lambda anchor: True),
        patch.object(all_reduce_update, "run_whole_update", counted),
        torch._inductor.config.patch(force_disable_caches=True),
        autofuse.debug() as report,
        torch.no_grad(),
    ):
        call = torch.compile(several, fullgraph=True, **on_cpus._how(generated))
        for _ in range(2):
            torch.testing.assert_close(call(*found), several(*kept))
            torch.testing.assert_close(found[:4], kept[:4], rtol=2e-5, atol=2e-6)
    return became(report), calls


@pytest.mark.parametrize("generated", [False, True])
def test_one_op_has_the_results_of_many(ranks: Ranks, generated: bool) -> None:
    """Those that are updated alike, and that nothing between them computes."""
    (sites, calls), other = ranks(2).run(_several, generated, timeout=200)
    assert other == (sites, calls)
    assert sites == [(on_cpus.UPDATE, "")] * 5
    assert calls == [3, 1, 1] * 2


@pytest.mark.parametrize("rule", ["adam", "amsgrad", "sgd", "momentum"])
def test_rules_take_numbers_as_tensors(rule: str) -> None:
    """As the reference has them on GPUs."""
    adam = adam_terms((B1, B2), 1e-3, DECAY, rule == "amsgrad")
    row = numbers_at(sgd_terms(0.75, 0.5, DECAY, True) if RULES[rule].code in (2, 3) else adam, 3, 0.1)
    assert len(row) == NUMBERS
    torch.manual_seed(1)
    p, g, *states = (torch.rand(50) for _ in range(2 + len(RULES[rule].states)))
    found = [t.clone() for t in (p, *states)]
    RULES[rule].update(p, g, states, row)
    RULES[rule].update(found[0], g, found[1:], torch.tensor(row).unbind())
    for got, wanted in zip(found, (p, *states), strict=True):
        torch.testing.assert_close(got, wanted)
