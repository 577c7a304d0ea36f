"""The expert ops in a way that is named, for benchmarks."""

from autofuse.lowering.gpu.choice.calls import ByName

from .call import combine_call, dispatch_call
from .ways import COMBINE, DISPATCH

_ways = ByName({COMBINE: combine_call, DISPATCH: dispatch_call})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
