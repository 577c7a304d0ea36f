"""The expert ops in a way that is named, for benchmarks."""

from .calls import ByName
from .expert_ops import combine_call, dispatch_call
from .expert_ways import COMBINE, DISPATCH

_ways = ByName({COMBINE: combine_call, DISPATCH: dispatch_call})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
