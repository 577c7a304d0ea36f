"""What decisions depend on besides the graph, the settings and the sources.

All of it is the same on every rank ("Ranks decide alike" in docs/architecture.md), and a compiled graph is
used again only where all of it is the same.
"""

from __future__ import annotations

import os

import torch
from torch import fx

from autofuse.lowering import torch_internals
from autofuse.lowering.cpu import support as cpu
from autofuse.lowering.gpu import support as gpu
from autofuse.lowering.notes import place

from .graph.anchors import find_anchors
from .graph.permutation import marked_inputs
from .opaque import registrations


def circumstances(graph: fx.Graph) -> str:
    """Machine, kernels, groups of the graph's collectives, where these are called, custom ops
    that are declared to be collectives, inputs that are permutations; no rank, no folder."""
    anchors = find_anchors(graph)
    groups = {a.group for a in anchors if isinstance(a.group, str)}
    known = {g: w for g in sorted(groups) if (w := torch_internals.group_world(g)) is not None}
    spans = [torch_internals.group_spans_hosts(group) for group in known]
    # A fused op carries its site, by which ranks know each other's calls.
    sites = [place(a.source or a.kind) for a in anchors]
    devices = {a.node.meta["val"].device for a in anchors if isinstance(a.node.meta.get("val"), torch.Tensor)}
    gpus = sorted({gpu.why_not(d) or "" for d in devices if d.type != "cpu"})
    machine = (torch.__version__, os.cpu_count(), cpu.available(), gpus)
    return repr((*machine, known, spans, sites, registrations(graph), marked_inputs(graph)))
