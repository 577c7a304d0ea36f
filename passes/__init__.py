"""FX graph -> FX graph: the pass finds the sites of a post-grad graph and rewrites them to fused ops."""

from .circumstances import circumstances, circumstances_of_any_graph
from .fuse import fuse
from .graph.marks import mark_inputs
from .safely import fuse_or_keep, reschedule_or_not, unless_faulty
from .schedules.saved import saved_bytes
from .settings import Settings

__all__ = [
    "Settings",
    "circumstances",
    "circumstances_of_any_graph",
    "fuse",
    "fuse_or_keep",
    "mark_inputs",
    "reschedule_or_not",
    "saved_bytes",
    "unless_faulty",
]
