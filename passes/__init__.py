"""FX graph -> FX graph: the pass finds the sites of a post-grad graph and rewrites them to fused ops."""

from .circumstances import circumstances
from .fuse import fuse
from .graph.permutation import mark_permutations
from .settings import Settings

__all__ = ["Settings", "circumstances", "fuse", "mark_permutations"]
