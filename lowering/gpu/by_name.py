"""The ways of all ops that have kernels, by name. Benchmarks run a way by its name."""

from autofuse.lowering.gpu.choice.calls import ByName

from .dense.call import CALLS as DENSE
from .embedding.call import CALLS as EMBEDDING
from .experts.call import CALLS as EXPERTS
from .optimizer.call import CALLS as OPTIMIZER
from .optimizer.whole_call import CALLS as WHOLE_UPDATES

_ways = ByName({**DENSE, **EMBEDDING, **EXPERTS, **OPTIMIZER, **WHOLE_UPDATES})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
