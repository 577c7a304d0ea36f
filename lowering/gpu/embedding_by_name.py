"""The exchanges of embedding bags in a way that is named, for benchmarks."""

from .calls import ByName
from .embedding import embedding_call
from .embedding_backward import embedding_backward_call
from .embedding_update import embedding_update_call
from .exchange_ways import BACKWARD, OP, UPDATE

_ways = ByName({OP: embedding_call, BACKWARD: embedding_backward_call, UPDATE: embedding_update_call})
names, run, chosen, keep = _ways.names, _ways.run, _ways.chosen, _ways.keep
