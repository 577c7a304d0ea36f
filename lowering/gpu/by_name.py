"""The ways of all ops that have kernels, by name: for benchmarks."""

from autofuse.lowering.gpu.choice.calls import ByName

from .dense.call import CALLS as DENSE
from .embedding.call import CALLS as EMBEDDING
from .experts.call import CALLS as EXPERTS
from .optimizer.call import CALLS as OPTIMIZER

_ways = ByName({**DENSE, **EMBEDDING, **EXPERTS, **OPTIMIZER})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
