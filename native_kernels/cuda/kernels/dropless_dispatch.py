"""Launches dropless_dispatch.cu: all_to_all_expert_matmul of experts with any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from struct import pack

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.experts import MOST_WEIGHTS, tile_cols
from autofuse.native_kernels.cuda.host.gemm import (
    BK,
    BOX,
    POINTERS,
    TENSOR_MAP,
    Constants,
    blocks,
    fields,
    filled,
    launch,
    note,
    of_call,
    views,
    weight_map,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel, tensor_map
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, per_memory
from autofuse.native_kernels.gpu.prepared import Values, put

from .dropless_combine import (
    HEIGHTS,
    SLICE,
    STARTS,
    STARTS_OF_PARTS,
    DroplessConfig,
    dropless_constants,
    height_of,
)

SOURCE = "dropless_dispatch.cu"
MOST_OUTPUTS = MOST_WEIGHTS + 1


class _Params(ctypes.Structure):
    _fields_ = (
        ("exchanged", TENSOR_MAP * 2),
        ("w", TENSOR_MAP * MOST_WEIGHTS),
        ("out", ctypes.c_void_p * MOST_OUTPUTS),
        ("parts", ctypes.c_void_p),
        ("bias", ctypes.c_void_p * MOST_WEIGHTS),
        *fields(ctypes.c_void_p, "offsets", "positions"),
        *fields(POINTERS, "memory", "places", "signals"),
        *fields(ctypes.c_void_p, "state", "trace"),
        *fields(ctypes.c_int64, "half", "places_half", "signals_half"),
        *fields(STARTS_OF_PARTS, "sent", "received"),
        *fields(ctypes.c_int32, "rows", "n", "k", "rank", "site", "slot", "cols", "programs"),
    )


def dropless_dispatch_needs(rows: int, k: int, world: int) -> Need:
    """What a call uses, of `rows` rows that a rank sends or receives in all, of 16-bit floats."""
    return Need(
        inbox=2 * rows * k * 2, finished=2 * 4 * world * rows, signals=2 * 4 * (STARTS + cdiv(rows, SLICE))
    )


def dropless_dispatch_constants(
    experts: int, world: int, transposed: bool, dtype: torch.dtype, biased: bool, height: int,
    config: DroplessConfig, trace: bool, weights: int = 1, gated: bool = False,
    kept: bool = False,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with. Without a gate the kernel knows nothing of it."""
    own = {"WEIGHTS": weights} | ({"GATED": 1, "KEPT": kept} if gated else {})
    return dropless_constants(
        _Params, experts, world, transposed, dtype, biased, height, config, trace, BOX, **own
    )


def launch_dropless_dispatch(
    memory: PeerMemory,
    x: Tensor,
    w: Sequence[Tensor],
    out: Sequence[Tensor],
    offsets: Tensor | None,
    positions: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    config: DroplessConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Sequence[Tensor] = (),
    gated: bool = False,
) -> None:
    """`x: [sum(sent), K]`, contiguous, in parts for the ranks, becomes `X: [rows, K]` of the ranks.

    Row i of X is row `positions[i]` (int64; None: i) of the rows that arrive, `received[s]` from every rank:
    a permutation. Of up to MOST_WEIGHTS weights, all of them row-major or all transposed, out[i]: [rows, N]
    is X times the weight of each row's expert, `w[i]: [E, K, N]`, plus `bias[i]: [E, N]`, or there is none.
    gated: of two weights without a bias; out[0] is silu(X @ w[0]) * (X @ w[1]), rounded as by ops of torch.
    Behind it come both products, if there is room for three outputs.
    Rows of expert e end at `offsets[e]` (int32; None: all have as many), behind the last one out is 0.
    Offsets and positions are contiguous, on the device. trace: three rows of events a program.
    """
    k, (experts, _, n), rows = x.shape[1], w[0].shape, out[0].shape[0]
    kind = memory, experts, k, n, w[0].stride(2) != 1, x.dtype, len(bias) > 0
    for height in HEIGHTS if compile_only else (height_of(rows, experts),):
        made = len(w), gated, len(out) > len(w)
        found, template = _prepared(*kind, height, config, trace is not None, *made)
    if compile_only:
        return
    params = filled(template, site, trace, parts=x, offsets=offsets, positions=positions)
    put(dropless_dispatch_values(received, sent), ctypes.addressof(params))
    for name, tensors in {"bias": bias, "out": out}.items():
        for i, tensor in enumerate(tensors):
            getattr(params, name)[i] = tensor.data_ptr()
            note(params, name, tensor, i)
    for i, wi in enumerate(w):
        ctypes.memmove(params.w[i], weight_map(wi, config.bn // (2 if gated else config.across)), 128)
        note(params, "w", wi, i, is_map=True)
    launch(found, params, config.cluster)


def dropless_dispatch_values(received: Sequence[int], sent: Sequence[int]) -> Values:
    """The parameters that tell the rows of a call."""
    told = {"rows": [sum(received)], "sent": [0, *accumulate(sent)], "received": [0, *accumulate(received)]}
    return [(getattr(_Params, name).offset, pack(f"{len(ints)}i", *ints)) for name, ints in told.items()]


@per_memory
def _prepared(
    memory: PeerMemory, experts: int, k: int, n: int, transposed: bool, dtype: torch.dtype, biased: bool,
    height: int, config: DroplessConfig, trace: bool, weights: int, gated: bool, kept: bool,
) -> tuple[Kernel, _Params]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    world, half = memory.world, memory.inbox.half(dtype)
    compiled_with = dropless_dispatch_constants(
        experts, world, transposed, dtype, biased, height, config, trace, weights, gated, kept
    )
    shared = config.shared_bytes(experts, height, BOX)
    found = kernel(SOURCE, "dropless_dispatch", compiled_with, shared)
    places_half = memory.finished.half(torch.int32)
    params = _Params(
        **of_call(memory, blocks(memory, config)), memory=views(memory.inbox), places=views(memory.finished),
        signals=views(memory.signals), half=memory.inbox.half(torch.uint8), places_half=places_half,
        signals_half=memory.signals.half(torch.int32), n=n, k=k, slot=places_half // world,
        cols=tile_cols(2 * n, config, 1) if gated else tile_cols(n, config, weights),
    )  # fmt: skip
    own = memory.inbox.views[memory.rank].view(dtype)
    for parity in range(2):
        rows = own[parity * half :][: half // k * k].view(1, -1, k)
        ctypes.memmove(params.exchanged[parity], tensor_map(rows, height // config.along, BK), 128)
    return found, params
