"""Custom ops that are registered as collectives: fused like torch's own, and themselves again where kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

import autofuse
from autofuse.backend import FusionPass
from autofuse.options import settings
from autofuse.passes import circumstances
from tests.ranks import RankPool

from . import opaque_ops
from .harness import fake_group, passes_only
from .opaque_ops import engine, register
from .test_graphs import rewritten

Ranks = Callable[[int], RankPool]
AR, RS, AG = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"

register()


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return engine.all_reduce(F.linear(x, w), "tp:0").relu()


def scattered(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: engine.reduce_scatter(F.linear(x, w), dim, 2, "tp:0").relu()


def gathered(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: F.linear(engine.all_gather(x, dim, 2, "tp:0"), w).relu()


def combined(x: Tensor, w: Tensor) -> Tensor:
    y = torch.bmm(x, w).view(3, 2, 4, 5).transpose(0, 1).reshape(6, 4, 5)
    return engine.all_to_all(y, "tp:0").relu()


def combined_with_splits(x: Tensor, w: Tensor) -> Tensor:
    y = torch.bmm(x, w).view(3, 2, 4, 5).transpose(0, 1).reshape(6, 4, 5)
    return engine.all_to_all(y, "tp:0", [3, 3], [3, 3]).relu()


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Kept, fused, kept: the kept ones read and are read by what is rewritten."""
    whole = engine.all_gather(x.sin(), 1, 2, "tp:0")
    part = engine.reduce_scatter(F.linear(whole, w).sin() + whole[..., :4], 1, 2, "tp:0")
    return engine.reduce_scatter(engine.all_reduce(part, "tp:0").cos(), -1, 2, "tp:0"), whole.transpose(0, 1)


def read_by_both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The kept op reads what the fused one has gathered."""
    whole = engine.all_gather(x, 1, 2, "tp:0")
    return F.linear(whole, w), engine.reduce_scatter(whole, 1, 2, "tp:0")


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return engine.all_reduce(F.linear(x, w), "tp:0", 0.5)


def unknown_group(x: Tensor, w: Tensor) -> Tensor:
    return engine.all_reduce(F.linear(x, w), "pp:0")


def other_world(x: Tensor, w: Tensor) -> Tensor:
    return engine.all_gather(x, 0, 8, "tp:0") @ w.t()


X, W = (2, 6, 8), (4, 8)
# program, shapes, fused, kept ops, ops that run
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str], list[str]]] = {
    "all_reduce": (reduced, (X, W), [AR], []),
    "reduce_scatter dim 0": (scattered(0), (X, W), [RS], []),
    "reduce_scatter dim 1": (scattered(1), (X, W), [RS], []),
    "reduce_scatter last dim": (scattered(-1), (X, W), [RS], []),
    "all_gather dim 0": (gathered(0), (X, W), [AG], []),
    "all_gather dim 1": (gathered(1), (X, W), [AG], []),
    "all_gather last dim": (gathered(-1), ((2, 6, 4), W), [AG], []),
    "all_to_all": (combined, ((3, 8, 7), (3, 7, 5)), ["expert_matmul_all_to_all"], []),
    "all_to_all, splits": (
        combined_with_splits,
        ((3, 8, 7), (3, 7, 5)),
        ["expert_matmul_all_to_all"],
        [],
    ),
    "kept between": (mixed, (X, W), [AG], ["reduce_scatter", "all_reduce", "reduce_scatter"]),
    "kept behind": (read_by_both, (X, W), [AG], ["reduce_scatter"]),
    "kept behind, batch of one": (read_by_both, ((1, 6, 8), W), [AG], ["reduce_scatter"]),
    "scaled": (scaled, (X, W), [], ["all_reduce"]),
}


def inputs(name: str, rank: int = 0) -> list[Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(shape) for shape in CASES[name][1]]


def _compare(
    rank: int, world: int, name: str, dynamic: bool | None
) -> tuple[list[str], list[str], list[str]]:
    """What was fused and kept, and which of the ops have run."""
    fn, args = CASES[name][0], inputs(name, rank)
    expected = fn(*args)
    torch._dynamo.reset()
    opaque_ops.calls.clear()
    with torch.no_grad(), autofuse.debug() as report:
        actual = torch.compile(fn, backend=passes_only(), dynamic=dynamic)(*args)
    torch.testing.assert_close(actual, expected)
    return [str(s.pattern) for s in report.fused], [s.collective for s in report.kept], opaque_ops.calls


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, ranks: Ranks) -> None:
    _, _, fused, kept = CASES[name]
    for result in ranks(2).run(_compare, name, None):
        assert result == (fused, [f"engine::{op}" for op in kept], kept)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter dim 1", "all_gather dim 1"])
def test_dynamic_shapes(name: str, ranks: Ranks) -> None:
    for fused, _, calls in ranks(2).run(_compare, name, True):
        assert (fused, calls) == (CASES[name][2], [])


def _generated(rank: int, world: int) -> None:
    """With Inductor's code."""
    args = inputs("kept between", rank)
    compiled = torch.compile(mixed, backend="autofuse", options={"policy": "always"})
    with torch.no_grad(), autofuse.debug() as report:
        torch.testing.assert_close(compiled(*args), mixed(*args))
    assert len(report.fused) == 1


def test_generated_code(ranks: Ranks) -> None:
    ranks(2).run(_generated, timeout=150)


def explain(fn: Callable[..., Any], *args: Any) -> autofuse.Report:
    with fake_group(2), autofuse.config.patch(policy="always"), torch.no_grad():
        return autofuse.explain(fn)(*args)


def test_the_report_names_the_op_and_its_line() -> None:
    (site,) = explain(reduced, *inputs("all_reduce")).sites
    assert (site.collective, site.op, site.world) == ("engine::all_reduce", f"autofuse::{AR}", 2)
    assert site.source is not None
    assert site.source.rpartition(":")[0] == __file__


@pytest.mark.parametrize(
    ("fn", "reason", "detail"),
    [
        (
            unknown_group,
            "group_unknown",
            "engine::all_reduce has no process group for 'pp:0': KeyError('pp:0')",
        ),
        (other_world, "group_unknown", "engine::all_gather says 8 ranks, but its group has 2"),
        (scaled, "unsupported_variant", "an argument of engine::all_reduce is no constant, or has no role"),
    ],
)
def test_reasons(fn: Callable[..., Any], reason: str, detail: str) -> None:
    report = explain(fn, torch.zeros(6, 8), torch.zeros(4, 8))
    (site,) = report.sites
    assert site.reason is not None
    assert site.reason.value == reason
    assert detail in site.detail
    assert "engine.all_" in str(report.graphs[0].after)
    assert "_c10d_functional" not in report.graphs[0].after


def test_graph_of_one_fused_and_one_kept() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return engine.all_reduce(F.linear(engine.all_gather(x, 1, 4, "tp:0"), w).tanh(), "tp:0")

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 3, 8), torch.zeros(4, 8)),
        """\
permute_default: [3, 2, 8] = aten.permute.default(arg0, [1, 0, 2])
permute_default_2: [2, 3, 8] = aten.permute.default(permute_default, [1, 0, 2])
reshape_default: [6, 8] = aten.reshape.default(permute_default_2, [6, 8])
permute: [8, 4] = aten.permute.default(arg1, [1, 0])
all_gather_matmul_default:  = autofuse.all_gather_matmul.default(reshape_default, [permute], [], 0, 2, False, '0', 'direct', SITE)
getitem: [24, 4] = getitem(all_gather_matmul_default, 0)
view_1: [2, 12, 4] = aten.reshape.default(getitem, [2, 12, 4])
tanh: [2, 12, 4] = aten.tanh.default(view_1)
all_reduce_default_1: [2, 12, 4] = engine.all_reduce.default(tanh, 'tp:0')
return (all_reduce_default_1,)""",
    )


def test_policy_never_leaves_the_graph() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return engine.reduce_scatter(F.linear(x, w), 1, 4, "tp:0")

    assert_expected_inline(
        rewritten(fn, torch.zeros(8, 8), torch.zeros(4, 8), policy="never"),
        """\
permute: [8, 4] = aten.permute.default(arg0, [1, 0])
mm: [8, 4] = aten.mm.default(arg1, permute)
reduce_scatter_default: [8, 1] = engine.reduce_scatter.default(mm, 1, 4, 'tp:0')
return (reduce_scatter_default,)""",
    )


def test_the_cache_key_covers_registrations_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.symbolic_trace(lambda x: engine.all_reduce.default(x, "tp:0")).graph

    def key() -> str | None:
        fusion = FusionPass(settings(), (), 0)
        with fusion.compiling("inference", circumstances(graph)):
            return fusion.uuid()

    with fake_group(2):
        first = key()
        assert first == key()
        autofuse.register_collective(
            "engine::all_reduce", "all_reduce", group=opaque_ops.group, reduce_op="avg"
        )
        second = key()
        register()
        assert key() == first
        other = torch.distributed.new_group([0, 1])
        monkeypatch.setattr(opaque_ops, "group", lambda name: other)
        register()
        third = key()
    monkeypatch.undo()
    register()
    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("op", "kind", "arguments", "message"),
    [
        ("engine::missing", "all_reduce", None, "there is no op 'engine::missing'"),
        ("engine", "all_reduce", None, "there is no op 'engine'"),
        ("engine::all_reduce", "broadcast", None, "expected one of 'all_reduce', "),
        ("engine::scale_", "all_reduce", None, "mutates nothing"),
        ("engine::two", "all_reduce", None, "returns one Tensor"),
        ("engine::quantised", "all_reduce", None, "argument 'scale' has no meaning for all_reduce"),
        ("engine::reduce_scatter", "all_reduce", None, "argument 'dim' has no meaning for all_reduce"),
        ("engine::nameless", "all_reduce", None, "no argument is the group"),
        ("engine::all_reduce", "all_reduce", {"dim": "x"}, "no role 'dim'"),
        ("engine::all_reduce", "all_reduce", {"group": "tp"}, "has no argument 'tp'"),
        ("_c10d_functional::all_reduce", "all_reduce", None, "need not be registered"),
    ],
)
def test_what_does_not_fit_raises(op: str, kind: str, arguments: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autofuse.register_collective(op, kind, arguments=arguments)
