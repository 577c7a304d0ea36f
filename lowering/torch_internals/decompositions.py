"""Decompositions of Inductor that run after the fusion, since they replace ops that the fusion looks for.

Inductor replaces a matmul by products and sums if its sizes are very small, such as a contracted size of 1.
It replaces `repeat_interleave`, by which experts order their rows, if the size of its result is a constant.
It drops empty parts from a `cat`, such as the results of experts without rows, and a `cat` of one part.
It does so while it traces the graph, before the fusion. But such sizes are a rank's own affair: the
contracted size, the rows of its experts, and whether they have changed between calls, so that they are
symbols. One rank might then find no matmul at a collective where its peers find one, and the ranks would wait
for each other. So graphs are traced without these decompositions, and `decompose_later` applies them to what
the fusion has left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def decompose_later(graph: fx.Graph) -> None:
    """Apply to `graph`, in place, the decompositions that `decompositions_before` leaves out."""
    _passes().apply(graph)


def decompositions_before(config_patches: Mapping[str, Any]) -> dict[Any, Any]:
    """Inductor's decompositions under these changes to its configuration, without those of `_hiding`, with
    `_times_zero` and `_joined`."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(dict(config_patches)):
        table = select_decomp_table()
    hiding = _hiding()
    kept = _Table((op, function) for op, function in table.items() if op not in hiding)
    kept[torch.ops.aten.mul.Tensor] = _times_zero
    cat = torch.ops.aten.cat.default
    if cat in kept:
        kept[cat] = functools.partial(_joined, kept[cat])
    return kept


def _times_zero(x: torch.Tensor, factor: object) -> torch.Tensor:
    """Replace `x * 0` by `x * 0.0`. Before the fusion Inductor replaces the former by a constant, and x is
    dead then; it keeps the latter."""
    if isinstance(factor, int) and factor == 0 and x.dtype.is_floating_point:
        return torch.ops.aten.mul.Tensor(x, 0.0)
    return NotImplemented


def _joined(
    of_inductor: Callable[..., Any], parts: Sequence[torch.Tensor], dim: int = 0
) -> torch.Tensor | Any:
    """Inductor's decomposition of a `cat`, unless it would drop empty parts that have the dims of the others;
    Inductor can generate code for these. Empty vectors go beside tensors of any number of dims."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    alike = len({part.dim() for part in parts}) == 1
    if alike and any(guard_or_false(part.shape[dim] == 0) for part in parts):
        return NotImplemented
    return of_inductor(parts, dim)


class _Table(dict[Any, Any]):
    """A table that Inductor takes into the keys of its cache. Not all functions in it can be pickled; the
    configuration and the sources of this module, which determine the table, are parts of the keys already."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Table, ()


def matmuls() -> tuple[torch._ops.OpOverload, ...]:
    aten = torch.ops.aten
    return aten.mm.default, aten.addmm.default, aten.bmm.default


def _hiding() -> tuple[torch._ops.OpOverload, ...]:
    return (*matmuls(), torch.ops.aten.repeat_interleave.Tensor)


@functools.cache
def _passes() -> Any:
    """A pattern for each op. Its replacement calls the same op: when Inductor traces the replacement, it
    applies its own decompositions."""
    from torch._inductor.pattern_matcher import (
        CallFunctionVarArgs,
        PatternMatcherPass,
        register_graph_pattern,
    )

    def replace(match: Any, *args: fx.Node, **kwargs: Any) -> None:
        match.replace_by_example(functools.partial(match.output_node().target, **kwargs), args)

    passes = PatternMatcherPass(pass_name="autofuse_decompose_later")
    for op in _hiding():
        pattern = CallFunctionVarArgs([op])
        register_graph_pattern(pattern, lambda match: _decomposes(match.output_node()), pass_dict=passes)(
            replace
        )
    return passes


def _decomposes(node: fx.Node) -> bool:
    from torch._inductor.decomposition import decompositions

    function = decompositions.get(node.target)
    vals = [n.meta.get("val") for n in node.args if isinstance(n, fx.Node)]
    numbers = not any(isinstance(n, fx.Node) for n in node.kwargs.values())
    tensors = len(vals) == len(node.args) and all(isinstance(val, torch.Tensor) for val in vals)
    if function is None or not numbers or not tensors:
        return False
    with vals[0].fake_mode:
        return function(*vals, **node.kwargs) is not NotImplemented
