"""Compile a program through Inductor's passes and ours, and run the graph without code generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

import autofuse
from autofuse.backend import fusion_pass, graph_kind, may_rest
from autofuse.declarations import given
from autofuse.lowering import torch_internals
from autofuse.options import resolve
from autofuse.passes.report import Report
from autofuse.passes.schedules.schedule import Basis


@dataclass(frozen=True)
class Program:
    """`build(world, rank)` returns a callable and its arguments; `fused` and `kept` say what must become.

    `fused` lists the patterns by kind of graph; `kept` the reason codes. `grad`: also run backward.
    """

    build: Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]
    fused: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    grad: bool = False
    dynamic: bool | None = None
    tolerance: float = 1e-5
    worlds: tuple[int, ...] = (2,)
    unfused: bool = False
    """Compare with the unfused graph, since torch.compile itself differs from eager."""
    breaks: str = ""
    """What the report says of the graph break that dynamo makes; empty if there must be none."""

    @property
    def sites(self) -> tuple[list[str], list[str]]:
        """`fused` and `kept` as the function `sites` has them."""
        fused = sorted(f"{kind} {pattern}" for kind, patterns in self.fused.items() for pattern in patterns)
        kept = sorted(f"{kind} {reason}" for kind, reasons in self.kept.items() for reason in reasons)
        return fused, kept


def since(release: str, program: Program, **before: Any) -> Program:
    """The program as torch compiles it from `release` on; in earlier ones `before` is different."""
    return program if TorchVersion(torch.__version__) >= release else replace(program, **before)


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def without_code(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """In place of Inductor's `compile_fx_inner`: its post-grad passes, then the graph as it stands."""
    torch_internals.run_post_grad_passes(gm, example_inputs, kwargs.get("is_inference", False))
    return make_boxed_func(gm.forward)


def passes_only(policy: str = "always", **options: Any) -> Callable[..., Any]:
    """A backend: everything up to Inductor's post-grad passes, then the graph as it stands.

    options: those of autofuse.
    """
    numbers = itertools.count()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        settings, patches = resolve(None, {"policy": policy, **options})
        inputs = given(gm, example_inputs)
        basis = Basis(inputs.of_graph, compared=may_rest(settings, inputs))
        fusion, patches = fusion_pass(next(numbers), settings, patches, basis)

        def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            with fusion.compiling(graph_kind(kwargs)):
                return without_code(gm, example_inputs, **kwargs)

        return torch_internals.compile_fx(gm, example_inputs, compile_graph, patches)

    return backend


def sites(report: Report) -> tuple[list[str], list[str]]:
    """What was fused and what was kept, by kind of graph."""
    kinds = {graph.name: graph.kind for graph in report.graphs}
    fused = sorted(f"{kinds[site.graph]} {site.pattern}" for site in report.fused)
    kept = sorted(
        f"{kinds[site.graph]} {site.reason.value}" for site in report.kept if site.reason is not None
    )
    return fused, kept


def became(report: Report) -> list[tuple[Any, str]]:
    """What each collective is fused into, or the code of its reason; and the particulars of that."""
    return [
        (site.pattern if site.fused else site.reason and site.reason.value, site.detail)
        for site in report.sites
    ]


def assert_same_bits(t: torch.Tensor) -> None:
    """On all ranks."""
    every = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(every, t)
    assert all(torch.equal(other, t) for other in every)


def explain(program: Program, world: int, rank: int = 0) -> Report:
    """The report of a program under a fake group."""
    with fake_group(world, rank), autofuse.config.patch(policy="always"):
        torch.manual_seed(0)
        fn, args = program.build(world, rank)
        with torch.set_grad_enabled(program.grad):
            return autofuse.explain(fn, backward=program.grad)(*args)


def run(program: Program, backend: Callable[..., Any] | None, world: int, rank: int) -> list[torch.Tensor]:
    """Outputs, and with `grad` the gradients of inputs and parameters, eagerly or under a backend."""
    torch.manual_seed(100 + rank)
    fn, args = program.build(world, rank)
    call = fn if backend is None else torch.compile(fn, backend=backend, dynamic=program.dynamic)
    with torch.set_grad_enabled(program.grad):
        out = call(*args)
        outputs = list(out if isinstance(out, (tuple, list)) else (out,))
        found = [_local(o.detach()) for o in outputs]
        if program.grad:
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            leaves += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
            terms = [(_local(o).float() * (1 + i)).sum() for i, o in enumerate(outputs) if o.requires_grad]
            torch.stack(terms).sum().backward()
            found += [_local(leaf.grad) for leaf in leaves if leaf.grad is not None]
    return found


def _local(t: torch.Tensor) -> torch.Tensor:
    t = t.to_local() if hasattr(t, "to_local") else t
    return t.to_dense() if t.is_sparse else t


def compare(rank: int, world: int, module: str, name: str) -> dict[str, Any]:
    """On a real rank: the rewritten program against eager."""
    import importlib

    program: Program = importlib.import_module(module).PROGRAMS[name]
    torch._dynamo.reset()
    expected = run(program, passes_only("never") if program.unfused else None, world, rank)
    torch._dynamo.reset()
    with autofuse.debug() as report, torch._dynamo.config.patch(capture_scalar_outputs=True):
        actual = run(program, passes_only(), world, rank)
    assert len(expected) == len(actual), (len(expected), len(actual))
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        scale = b.double().abs().max().clamp(min=1e-30).item() if b.numel() else 1.0
        if b.numel():
            worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
            assert not a.double().isnan().any()
    return {"error": worst, "sites": sites(report), "breaks": report.graph_breaks, "report": str(report)}
