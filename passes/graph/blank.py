"""Tensors without content: empty ones and ones of zeros, into which rows are put.

The forward may save such a tensor for the backward where it has no elements, since that costs no memory. The
backward graph has it as an input then. Hence the joint graph is marked, as for permutations.
"""

from __future__ import annotations

from torch import fx

from .follow import aten, is_cast

MARK = "autofuse_blank"
EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_FULL = (aten.full.default, aten.full_like.default, aten.new_full.default)


def is_blank(node: object) -> bool:
    """Whether the node is known to be an empty tensor or one of zeros, or a cast of one.

    That a tensor has no elements does not count: the same tensor has elements on other ranks, and all ranks
    must decide alike.
    """
    if not isinstance(node, fx.Node):
        return False
    if is_cast(node):
        return is_blank(node.args[0])
    # Only inputs: rewrites of other nodes may copy `meta`.
    return makes_blank(node) or (node.op == "placeholder" and MARK in node.meta)


def makes_blank(node: fx.Node) -> bool:
    """Whether the node makes an empty tensor or one of zeros."""
    return node.target in (*EMPTY, *_ZEROS) or (node.target in _FULL and node.args[-1] == 0)
