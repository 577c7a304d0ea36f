"""The exchanges of embedding bags in a way that is named, for benchmarks."""

from .calls import ByName
from .embedding import embedding_call
from .embedding_backward import embedding_backward_call
from .exchange_ways import BACKWARD, OP

_ways = ByName({OP: embedding_call, BACKWARD: embedding_backward_call})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
