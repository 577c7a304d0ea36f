"""Small arrays of words, such as addresses, from the host to the device, in the order of a stream.

They travel as parameters of a kernel: nothing has to stay where it is until the device has read it, and a
captured CUDA graph has them in it.
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from autofuse.lowering.torch_internals import current_raw_stream
from autofuse.native_kernels.cuda.host.launcher import kernel

MOST = 1022
"""Words of one launch: 8 KiB with what goes before them."""


class _Params(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("count", ctypes.c_int64), ("words", ctypes.c_int64 * MOST))


def put_words(to: Tensor, words: Sequence[int]) -> None:
    """Store `words` to the beginning of `to` (int64, on the current device), on the current stream."""
    run = kernel("put_words.cu", "put_words", (("MOST", MOST),), 0)
    stream = current_raw_stream(run.device)
    for first in range(0, len(words), MOST):
        some = words[first : first + MOST]
        params = _Params(to.data_ptr() + 8 * first, len(some))
        params.words[: len(some)] = some
        run.launch(1, 1, 256, params, stream)
