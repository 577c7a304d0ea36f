"""The exchanges of embedding bags in a way that is named, for benchmarks."""

from autofuse.lowering.gpu.choice.calls import ByName

from .backward import embedding_backward_call
from .call import embedding_call
from .update import embedding_update_call
from .ways import BACKWARD, OP, UPDATE

_ways = ByName({OP: embedding_call, BACKWARD: embedding_backward_call, UPDATE: embedding_update_call})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
