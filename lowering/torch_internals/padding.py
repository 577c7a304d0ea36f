"""Inductor's padding of matmuls, as a pass that runs behind the fusion.

On GPUs Inductor pads a matmul whose sizes are no multiples of 8 (of 4 in float32), if it measures that to be
faster. It does so in the joint graph, before the fusion, and each rank measures by itself. One rank might
then find a slice between a matmul and its collective where its peers find none. They would fuse different
collectives, and wait for each other forever. So graphs are compiled without this padding, and `pad_matmuls`
pads the matmuls that the fusion has left.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from .decompositions import matmuls

PADDING = "shape_padding"
"""The setting of Inductor that turns its padding on."""


def pad_matmuls(graph: fx.Graph) -> None:
    """Pad matmuls of `graph` in place, where Inductor measures or has measured that to be faster."""
    from torch._inductor import config

    left = (n for target in matmuls() for n in graph.find_nodes(op="call_function", target=target))
    if any(map(_on_gpu, left)):
        with config.patch({PADDING: True}):
            _passes().apply(graph)


def _on_gpu(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cuda"


@functools.cache
def _passes() -> Any:
    """Inductor's patterns of `pad_mm`, with its own checks and replacements."""
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.pattern_matcher import (
        CallFunction,
        KeywordArg,
        PatternMatcherPass,
        register_graph_pattern,
    )

    def addmm_replace(added: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        return pad_mm.addmm_replace(added, mat1, mat2)

    passes = PatternMatcherPass(pass_name="autofuse_pad_mm")
    mm, addmm, bmm = matmuls()
    two = KeywordArg("mat1"), KeywordArg("mat2")
    three = (KeywordArg("input"), *two)

    def register(pattern: Any, check: Any, replacement: Any, *names: str) -> None:
        def pads(match: Any) -> bool:
            return not match.output_node().kwargs and bool(check(match))  # addmm: those that scale stay

        def replace(match: Any, **found: Any) -> None:
            match.replace_by_example(replacement, [found[name] for name in names])

        register_graph_pattern(pattern, pads, pass_dict=passes)(replace)

    register(CallFunction(mm, *two), pad_mm.should_pad_mm, pad_mm.mm_replace, "mat1", "mat2")
    register(CallFunction(bmm, *two), pad_mm.should_pad_bmm, pad_mm.bmm_replace, "mat1", "mat2")
    register(CallFunction(addmm, *three), pad_mm.should_pad_addmm, addmm_replace, "input", "mat1", "mat2")
    return passes
