"""The layouts of values over a group of ranks, inferred and proven (CoCoNet, section 2.1).

    replicated    the same on all ranks
    local         another value on each rank
    sliced(d)     each rank has its part along dim d
    unknown       nothing is proven

What is proven to be replicated: results of all_reduce and all_gather, inputs that are declared or are
DTensors placed so, and what deterministic ops compute from replicated values alone. A constant may differ
between ranks although the graphs look alike (`chunk(x, W)[rank]`, a bias on rank 0 only). So a proof comes
with a *digest* of all ops and constants that it rests on. It holds if the digests of all ranks are equal;
the ranks compare them before the graph runs for the first time.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.lowering.torch_internals import group_ranks_of
from autofuse.passes.graph.anchors import Anchor, find_anchors, fused_op, group_of
from autofuse.passes.graph.follow import WAIT, aten, expression, tensor, value
from autofuse.passes.graph.functional import arguments


@dataclass(frozen=True)
class Layout:
    """One of the above; `dim` of a slice."""

    kind: str
    dim: int | None = None

    def __str__(self) -> str:
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"


REPLICATED, LOCAL, UNKNOWN = Layout("replicated"), Layout("local"), Layout("unknown")

_EVERYWHERE = ("all_reduce", "all_reduce_", "all_gather", "broadcast")
"""Collectives whose results are the same on all ranks of their group."""

_REDUCTION = "matmul_all_reduce"
"""The fused op whose results are, but for the product."""

_KNOWN = ("aten", "prims")
"""Namespaces whose ops compute the same from the same, but for those that are tagged as random."""

_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


@dataclass(frozen=True)
class Input:
    """What is known of an input of a graph.

    Attributes:
        name: in reports, and in digests: the same on all ranks.
        over: layouts over groups of ranks.
        unlock: the declaration that would make it replicated.
        declared: whether users say so, and nothing else.
    """

    name: str
    over: tuple[tuple[frozenset[int], Layout], ...] = ()
    unlock: str = ""
    declared: bool = False

    def layout(self, ranks: frozenset[int]) -> Layout:
        """Replicated over a group is replicated over each part of it."""
        for group, layout in self.over:
            if group == ranks or (layout is REPLICATED and ranks < group):
                return layout
        return UNKNOWN


_NOTHING = Input("")


class Layouts:
    """The layouts of all values of a graph over one group."""

    def __init__(self, graph: fx.Graph, group: Any, inputs: Mapping[fx.Node, Input]) -> None:
        self.graph, self.group = graph, group
        self._inputs = inputs
        self._ranks = group_ranks_of(group)
        self._anchors = {anchor.node: i for i, anchor in enumerate(find_anchors(graph))}
        self._anchor = {anchor.node: anchor for anchor in find_anchors(graph)}
        self._found: dict[fx.Node, Layout] = {}
        self._digests: dict[fx.Node, str] = {}
        self._symbols = self._shared_symbols()

    def of(self, node: fx.Node) -> Layout:
        """Also of nodes that were inserted later. Iterative: a cone may be thousands of nodes deep."""
        stack = [] if node in self._found else [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if n not in self._found]
            if missing:
                stack += missing
            else:
                self._found[stack.pop()] = self._infer(top)
        return self._found[node]

    def replicated(self, node: fx.Node) -> bool:
        return self.of(node) == REPLICATED

    def proof(self, nodes: Iterable[fx.Node], more: str = "") -> str:
        """A digest of everything that the proofs that these values are replicated rest on, and of `more`."""
        return _digest([more, *sorted({self._digest_of(node) for node in nodes})])

    def inputs_of(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The inputs of the graph that the proofs rest on."""
        seen: set[fx.Node] = set()
        work = list(nodes)
        while work:
            node = work.pop()
            if node not in seen:
                seen.add(node)
                work += self._rests_on(node)
        return {node for node in seen if node.op == "placeholder"}

    def why(self, node: fx.Node) -> str:
        """The first value on which no proof of `node` could rest, and the declaration that would help."""
        while True:
            before = [n for n in node.all_input_nodes if not self.replicated(n)]
            if not before or node in self._anchor:
                break
            node = before[0]
        known = self._inputs.get(node)
        name = known.name if known is not None else node.name
        return f"{name} is {self.of(node)}" + (f": {known.unlock}" if known and known.unlock else "")

    def _is_same_size(self, node: fx.Node) -> bool:
        """Whether the node is a size that has one value on all ranks."""
        val = value(node)
        return isinstance(val, torch.SymInt) and _symbols_of(val) <= self._symbols

    def _shared_symbols(self) -> set[sympy.Symbol]:
        """The symbols that have one value on all ranks: lengths of inputs that are the same on all, and the
        one symbol in the shape of a value that all ranks add up."""
        found: set[sympy.Symbol] = set()
        for node in self.graph.nodes:
            known = tensor(node)
            if known is None:
                continue
            if (
                node.op == "placeholder"
                and self._inputs.get(node, _NOTHING).layout(self._ranks) == REPLICATED
            ):
                sizes = [expression(s) for s in known.shape]
                found |= {size for size in sizes if isinstance(size, sympy.Symbol)}
            elif node in self._anchor and self._anchor[node].kind == "all_reduce":
                symbols = set().union(*map(_symbols_of, known.shape))
                same = self._of_collective(self._anchor[node]) == REPLICATED
                found |= symbols if same and len(symbols) == 1 else set()
        return found

    def _infer(self, node: fx.Node) -> Layout:
        if self._is_same_size(node):
            return REPLICATED
        if node.op == "placeholder":
            known = self._inputs.get(node)
            return UNKNOWN if known is None else known.layout(self._ranks)
        if node.op == "get_attr":
            return REPLICATED if self._constant(node) is not None else UNKNOWN
        if node.op != "call_function":
            return UNKNOWN
        if node in self._anchor:
            return self._of_collective(self._anchor[node])
        if node.target in (WAIT, operator.getitem):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self._of_item(node, source)
        given = {self.of(n) for n in node.all_input_nodes}
        if not _computes_the_same(node):
            return LOCAL if _is_random(node) else UNKNOWN
        if given <= {REPLICATED}:
            return REPLICATED
        return LOCAL if given <= {REPLICATED, LOCAL} else UNKNOWN

    def _of_collective(self, anchor: Anchor) -> Layout:
        if anchor.known_group is None or group_ranks_of(anchor.known_group) != self._ranks:
            return UNKNOWN
        if anchor.kind in _EVERYWHERE:
            return REPLICATED
        return Layout("sliced", 0) if anchor.kind == "reduce_scatter" else UNKNOWN

    def _of_item(self, node: fx.Node, source: fx.Node) -> Layout:
        op = fused_op(source)
        if op is None:
            return self.of(source)
        given = arguments(source)
        group = None if given is None else group_of(given["group_name"])
        if op.name != _REDUCTION or given is None or group is None or group_ranks_of(group) != self._ranks:
            return UNKNOWN
        results = source.meta["val"]
        is_product = given["keep_product"] and node.args[1] == len(results) - 1
        same = not is_product and all(self.replicated(operand) for operand in given["tail_operands"])
        return REPLICATED if same else UNKNOWN

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        module = node.graph.owning_module
        found: Any = None if module is None else attrgetter(str(node.target))(module)
        real = isinstance(found, torch.Tensor) and type(found) in (torch.Tensor, torch.nn.Parameter)
        return found if real and found.device.type in ("cpu", "cuda") else None

    def _digest_of(self, node: fx.Node) -> str:
        """Of the cone that computes `node`. Iterative: a cone may be thousands of nodes deep."""
        stack = [node]
        while stack:
            top = stack[-1]
            inputs = self._rests_on(top)
            missing = [n for n in inputs if n not in self._digests]
            if missing:
                stack += missing
            else:
                self._digests[stack.pop()] = self._one_digest(top)
        return self._digests[node]

    def _rests_on(self, node: fx.Node) -> list[fx.Node]:
        """The inputs by which a proof goes on."""
        if self._is_same_size(node):
            return []
        if node.op != "call_function" or node in self._anchor:
            return []
        if fused_op(node) is not None:
            return list((arguments(node) or {}).get("tail_operands", ()))
        return node.all_input_nodes

    def _one_digest(self, node: fx.Node) -> str:
        if self._is_same_size(node):
            return _digest(["size", str(expression(value(node)))])
        if node.op == "placeholder":
            return _digest(["input", self._inputs[node].name if node in self._inputs else ""])
        if node.op == "get_attr":
            constant = self._constant(node)
            return _digest(["constant", None if constant is None else bits(constant)])
        if node in self._anchor:
            return _digest(["collective", self._anchors[node]])
        if fused_op(node) is not None:
            given = arguments(node) or {}
            tail = given.get("tail", ""), [self._digests[n] for n in self._rests_on(node)]
            return _digest([str(node.target), given.get("site"), tail])
        plain = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self._digests[n])
        return _digest([str(node.target), _on_any_rank(plain)])


def _symbols_of(size: int | torch.SymInt) -> set[sympy.Symbol]:
    return set(sympy.sympify(expression(size)).free_symbols)


def bits(t: torch.Tensor) -> str:
    """A digest of the dtype, the shape and all bits of a tensor."""
    # numpy knows no bfloat16, and views as bytes need adjacent elements
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() if t.numel() else torch.empty(0)
    found = hashlib.blake2b(repr((t.dtype, tuple(t.shape))).encode(), digest_size=16)
    found.update(flat.numpy().tobytes())
    return found.hexdigest()


def _digest(values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def _on_any_rank(arguments: Any) -> Any:
    """Arguments without the number of a device, which differs between ranks."""

    def plain(v: Any) -> Any:
        return v.type if isinstance(v, torch.device) else str(v) if isinstance(v, _SYMBOLS) else v

    return fx.node.map_aggregate(arguments, plain)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _computes_the_same(node: fx.Node) -> bool:
    """Whether the op computes the same from the same values, on any rank."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # Arithmetic on sizes
        return getattr(target, "__module__", "") in ("_operator", "math") and not _holds_tensor(node)
    known = target.namespace in _KNOWN and target not in _UNWRITTEN
    return known and not _is_random(node) and not target._schema.is_mutable


def _holds_tensor(node: fx.Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name
    return torch.Tag.nondeterministic_seeded in target.tags or "random" in name or "seed" in name
