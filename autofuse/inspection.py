"""`explain`, `debug` and `rewrite`: show what autofuse does to a model or a graph."""

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autofuse import passes
from autofuse.backend import autofuse as own_backend
from autofuse.backend import fusion_pass, graph_kind, may_rest, record
from autofuse.declarations import given
from autofuse.enabling import enabled
from autofuse.lowering import torch_internals
from autofuse.options import resolve, settings
from autofuse.passes.report import Report, collecting
from autofuse.passes.schedules.schedule import Basis
from autofuse.progress import Progress, silent
from autofuse.table_optimizers import UpdatedEmbeddingBag

_UNBACKED_SIZE = 4
"""Stands for sizes that depend on data. Nothing is computed, so any number is good enough."""


def explain(model: Callable[..., Any], backward: bool = False) -> Callable[..., Report]:
    """Returns `f(*args, **kwargs) -> Report`: the effect of `backend="autofuse"` on a call of `model`.

    Everything is compiled up to code generation; compiled graphs do not run, they return zeros. Python code
    between two graphs, after a graph break, gets those zeros, and collectives in it return at once. So one
    rank can call this alone, and a fake process group is enough. `backward` also asks for the gradients of
    all outputs, so that the report has backward graphs that are compiled late; no `.grad` changes.
    """

    def report(*args: Any, **kwargs: Any) -> Report:
        numbers = itertools.count()

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return _compile_without_code(gm, example_inputs, next(numbers))

        # Dynamo stores compiled code with the code of the outermost frame: a copy keeps the user's code
        # unchanged.
        call = types.FunctionType(_call.__code__.replace(), _call.__globals__)
        with debug() as result, _NoCollectives(), torch_internals.first_shapes_are_static():
            outputs = torch.compile(call, backend=backend)(model, args, kwargs)
            if backward:
                _backward(model, outputs, (args, kwargs))
        return result

    return report


@contextmanager
def explaining(
    options: Mapping[str, Any] | None = None, all_backends: bool = False, progress: Progress = silent
) -> Iterator[Report]:
    """Inside, `torch.compile(..., backend="autofuse")` does what `explain` does, in any code, and so does
    `backend="inductor"` where autofuse is enabled.

    `options` are those of the backend and win over those of each `torch.compile`. With `all_backends`, code
    that is compiled for another backend is treated as if it were for this one. `progress` counts the graphs.
    """
    numbers = itertools.count()
    torch_compile, overrides = torch.compile, options or {}

    def backend(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Any = None,
        enabled_with: Mapping[str, Any] = MappingProxyType({}),
    ) -> Callable[..., Any]:
        chosen = {**(options or {}), **enabled_with, **overrides}
        compiled = _compile_without_code(gm, example_inputs, next(numbers), mode, chosen)
        progress("graphs compiled", len(report.graphs), None)
        return compiled

    @functools.wraps(torch_compile)
    def compile_to_explain(model: Any = None, **kwargs: Any) -> Any:
        chosen = kwargs.get("backend", "inductor")
        stock = enabled() if chosen == "inductor" else None
        ours = chosen in ("autofuse", own_backend) or stock is not None
        if ours or all_backends:
            kwargs["backend"] = functools.partial(backend, enabled_with=stock) if stock else backend
            if not ours and chosen != "inductor":
                kwargs.update(mode=None, options=None)  # they are that backend's own
        return torch_compile(model, **kwargs)

    with debug() as report, _NoCollectives():
        torch.compile = compile_to_explain
        try:
            yield report
        finally:
            torch.compile = torch_compile


@contextmanager
def debug() -> Iterator[Report]:
    """Collects reports of everything that is compiled inside, compile-cache hits included."""
    before = torch_internals.graph_break_counts()
    with collecting() as report:
        try:
            yield report
        finally:
            report.graph_breaks.extend(torch_internals.graph_break_counts() - before)


def rewrite(graph_module: fx.GraphModule) -> Report:
    """Fuses in place, in a graph of post-grad form: functional ATen ops and collectives, `meta["val"]` set.

    The settings are those of `autofuse.config`.
    """
    with collecting() as report:
        record(passes.fuse(graph_module.graph, settings(), "inference", "graph 0"))
    graph_module.recompile()
    return report


def _call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _compile_without_code(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    number: int,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    chosen, patches = resolve(mode, options)
    inputs = given(gm, example_inputs)
    basis = Basis(inputs.of_graph, compared=may_rest(chosen, inputs))
    fusion, patches = fusion_pass(number, chosen, patches, basis)
    shapes: list[torch.Size | None] = []

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        # Taken before the passes, which may leave outputs of a fused op without metadata.
        torch_internals.propagate_fakes(gm, example_inputs)
        values = pytree.tree_map(functools.partial(_value, gm), gm.graph.output_node().args[0])
        with fusion.compiling(graph_kind(kwargs)):
            torch_internals.run_post_grad_passes(gm, example_inputs, kwargs.get("is_inference", False))
        return _returns_zeros(values, graph_kind(kwargs), shapes)

    return torch_internals.compile_fx(gm, example_inputs, compile_graph, patches)


def _value(gm: fx.GraphModule, node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    # A value that is no tensor, such as a device mesh, may be an attribute of the graph module.
    return getattr(gm, node.target) if node.op == "get_attr" else node.meta["val"]


def _returns_zeros(values: Sequence[Any], kind: str, shapes: list[torch.Size | None]) -> Callable[..., Any]:
    """Zeros in place of `values`. shapes: of the inputs of the last forward call. The backward graph returns
    their gradients. Autograd compares the shapes, and a size that is read from a tensor is a guess here."""

    def zeros(inputs: list[Any]) -> list[Any]:
        if kind == "forward":
            shapes[:] = [t.shape if isinstance(t, torch.Tensor) else None for t in inputs]
        inputs.clear()
        found = [_zero(value) for value in values]
        if kind == "backward" and len(found) == len(shapes):
            pairs = zip(found, shapes, strict=True)
            return [z.new_zeros(s) if s is not None and isinstance(z, torch.Tensor) else z for z, s in pairs]
        return found

    zeros._boxed_call = True  # type: ignore[attr-defined]
    return zeros


def _zero(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return torch_internals.size_hint(value, _UNBACKED_SIZE)
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = (
        [torch_internals.size_hint(n, _UNBACKED_SIZE) for n in numbers]
        for numbers in (value.shape, value.stride())
    )
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).zero_()


class _NoCollectives(TorchDispatchMode):
    """Inside, collectives and fused ops outside of compiled graphs return at once.

    Tensors that are exchanged in place keep their values. A gather returns this rank's part from every rank.
    All other results are zero.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            _fill_output(func, args)
            # The results are the tensors that the op writes, its first argument, and a handle.
            done = torch_internals.finished_work(args[0])
            results = [done if "Work" in str(r.type) else args[0] for r in func._schema.returns]
            return results[0] if len(results) == 1 else tuple(results)
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "autofuse"):
            device = next(t.device for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
            zeros = functools.partial(torch.zeros_like, device=device)
            return pytree.tree_map_only(torch.Tensor, zeros, func(*args, **kwargs))
        return func(*args, **kwargs)


def _fill_output(func: Any, args: Any) -> None:
    """Fills the outputs of a collective: those of a gather with this rank's part, others with zeros."""
    name, arguments = func._schema.name, func._schema.arguments
    if name in ("c10d::allgather_", "c10d::gather_"):
        for parts, mine in zip(args[0], args[1], strict=False):  # gather_ has outputs on one rank
            for part in parts:
                part.copy_(mine)
    elif name == "c10d::_allgather_base_" and args[1].numel():
        whole, mine = args[:2]
        whole.view(-1, mine.numel()).copy_(mine.view(1, -1))
    elif arguments and arguments[0].name.startswith("output"):
        for tensor in pytree.tree_leaves(args[0]):
            tensor.zero_()


def _backward(model: Callable[..., Any], outputs: Any, inputs: Any) -> None:
    roots = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if isinstance(model, torch.nn.Module):
        leaves += [p for p in model.parameters() if p.requires_grad]
        leaves += [m.anchor for m in model.modules() if isinstance(m, UpdatedEmbeddingBag)]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.zeros_like(t) for t in roots], allow_unused=True)
