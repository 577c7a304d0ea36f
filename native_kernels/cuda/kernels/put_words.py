"""Copies small int64 arrays, such as tables of addresses, from the host to the device, in stream order.

The values are parameters of a kernel. So no host buffer has to live until the device has read it, and a
captured CUDA graph contains the values.
"""

import ctypes
from functools import cache

from torch import Tensor

from autofuse.lowering.torch_internals import current_raw_stream
from autofuse.native_kernels.cuda.host.compiler import Constants
from autofuse.native_kernels.cuda.host.launcher import kernel, macros

MOST = 1022
"""Most values of one launch: parameters of 8 KiB in all."""


class _Params(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("count", ctypes.c_int64), ("words", ctypes.c_int64 * MOST))


@cache
def _constants() -> Constants:
    return macros(_Params, {"MOST": MOST})


def put_words(to: Tensor, words: bytes) -> None:
    """Store `words`, int64, to the beginning of `to` (on the current device), on the current stream."""
    run = kernel("put_words.cu", "put_words", _constants(), 0)
    stream = current_raw_stream(run.device)
    for first in range(0, len(words), 8 * MOST):
        some = words[first : first + 8 * MOST]
        params = _Params(to.data_ptr() + first, len(some) // 8)
        ctypes.memmove(params.words, some, len(some))
        run.launch(1, 1, 256, params, stream)
