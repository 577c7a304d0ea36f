"""The circumstances of a compilation: inputs of its decisions besides the graph, the settings and the
sources.

The circumstances are the same on all ranks ("Ranks decide alike" in docs/architecture.md). They are part of
the cache key of a compiled graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import fx

from autofuse.lowering import torch_internals
from autofuse.lowering.cpu import support as cpu
from autofuse.lowering.gpu import support as gpu
from autofuse.lowering.notes import place

from .graph.anchors import find_anchors
from .graph.marks import marked_inputs
from .opaque import all_registrations, registrations
from .schedules.layouts import Input

Inputs = Callable[[fx.Graph], Mapping[fx.Node, Input]]


def circumstances(graph: fx.Graph, inputs: Inputs = lambda graph: {}) -> str:
    """The machine, its kernels, the groups and source lines of the graph's collectives, the user-defined
    collectives, the inputs that are permutations, and the layouts of `inputs` over the groups; of the graphs
    of its subgraphs, too. No rank and no folder."""
    module = graph.owning_module
    inner = () if module is None else [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return repr([_circumstances(each, inputs) for each in inner or (graph,)])


def _circumstances(graph: fx.Graph, inputs: Inputs) -> str:
    anchors = find_anchors(graph)
    groups = {a.group for a in anchors if isinstance(a.group, str)}
    known = {g: w for g in sorted(groups) if (w := torch_internals.group_world(g)) is not None}
    spans = [torch_internals.group_spans_hosts(group) for group in known]
    # A fused op has its site as an argument: ranks compare the sites of their calls.
    sites = [place(a.source or a.kind) for a in anchors]
    devices = {a.node.meta["val"].device for a in anchors if isinstance(a.node.meta.get("val"), torch.Tensor)}
    machine = _machine({d for d in devices if d.type != "cpu"})
    ranks = [torch_internals.group_ranks_of(group) for group in known]
    layouts = [[str(each.layout(r)) for r in ranks] for each in inputs(graph).values()]
    return repr((*machine, known, spans, sites, registrations(graph), marked_inputs(graph), layouts))


def circumstances_of_any_graph() -> str:
    """The circumstances of whatever this process compiles, for a pass that names no lines (`Settings.lines`)
    and whose graph is not known when its identity is asked for. Processes with other groups differ."""
    groups = torch_internals.group_ranks()
    spans = [torch_internals.group_spans_hosts(group) for group in groups]
    machine = _machine({torch.device("cuda")} if torch.cuda.is_available() else set())
    return repr((*machine, groups, spans, all_registrations()))


def _machine(devices: set[torch.device]) -> tuple[object, ...]:
    gpus = sorted({gpu.why_not(d) or "" for d in devices})
    return torch.__version__, os.cpu_count(), cpu.available(), gpus
