"""Parts that the kernels share in which an optimizer exchanges packets, and their launch.

bits_of, values_of   the payload of packets, and back
has_arrived          whether packets are of this call
send_buckets         send gradients to the owners of their buckets
send_parameters      send the parameters of a bucket to all peers
take_parameters      take the parameters of a bucket from its owner

A rank has two halves of packets (int64). A half begins with two regions [W, buckets of the longest run,
1024]: gradients, then parameters, by their source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, launch

from .comm import CODES_PER_SITE, COPYING, peer, put_packets, tag_of
from .packet_shares import take_or_help
from .update_launch import KINDS
from .update_parts import LENGTH, at, buckets_of, elements_of, item_and_peer, lanes

MOST_BUCKETS = 128
"""Of a run. With more, the bytes of packets outweigh what signals cost."""


@dataclass(frozen=True)
class UpdatePacketsConfig:
    """The configuration of a kernel that exchanges packets."""

    warps: int = 16


@triton.jit
def bits_of(values):
    """The bits of values of any dtype, as uint32."""
    if values.dtype.primitive_bitwidth == 32:
        found = values.to(tl.uint32, bitcast=True)
    else:
        found = values.to(tl.uint16, bitcast=True).to(tl.uint32)
    return found


@triton.jit
def values_of(packets, DTYPE: tl.constexpr):
    """The values of packets that `bits_of` went into."""
    bits = packets.to(tl.uint32)
    if DTYPE.primitive_bitwidth == 32:
        found = bits.to(DTYPE, bitcast=True)
    else:
        found = bits.to(tl.uint16).to(DTYPE, bitcast=True)
    return found


@triton.jit
def has_arrived(packets, epoch):
    """Whether packets are of this call. Others are left when a wait gives up: the kernel does not change
    their elements, and sends no parameters for them."""
    return (packets >> 32) == tag_of(epoch)


@triton.jit
def send_buckets(
    words, buckets, packets, most, rank, share, base, epoch, programs,
    W: tl.constexpr, GRADS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Send the gradients of every `programs`-th bucket of peers from number `share` on to its owner."""
    for unit in range(share, (W - 1) * most, programs):
        item, owner = item_and_peer(unit, rank, W)
        word = buckets_of(words, buckets, owner, item, 0, most, 1)
        _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, GRADS)
        values = tl.load(given, mask=mask, other=0.0)
        to = peer(packets, owner, tl.int64) + base + (rank * most + item) * LENGTH + lanes()
        put_packets(to, bits_of(values), epoch, inside[:, None] & (lanes() >= 0))


@triton.jit
def send_parameters(packets, base, new, item, most, rank, epoch, mask, W: tl.constexpr):
    """Send the parameters `new` of a bucket of this rank to all peers. base: of the half of this call."""
    to = base + ((W + rank) * most + item) * LENGTH + lanes()
    for step in tl.static_range(1, W):
        theirs = peer(packets, (rank + step) % W, tl.int64) + to
        put_packets(theirs, bits_of(new), epoch, mask)


@triton.jit
def take_parameters(
    words, buckets, own, state, copy, most, rank, site, program, programs, adding, epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store what the owner of bucket number `copy` of peers has sent to the parameters. own: the half of this
    rank. Returns the share of A and that of B that `take_or_help` has found, and whether neither was."""
    within, owner = item_and_peer(copy, rank, W)
    word = buckets_of(words, buckets, owner, within, 0, most, 1)
    _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
    param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, PARAMS)
    where = ((W + owner) * most + within) * LENGTH + lanes()
    wanted = inside[:, None] & (lanes() >= 0)
    code = site * CODES_PER_SITE + COPYING
    new, share, other, _ = take_or_help(
        own + where, epoch, wanted, state, code, owner, within, program, programs, adding, rank, W, 1,
        LEAVES=False, ADDS=True,
    )  # fmt: skip
    ended = ((share < 0) & (other < 0)).to(tl.int32)
    if ended != 0:
        tl.store(param, values_of(new, PARAMS), mask=mask & has_arrived(new, epoch))
    return share, other, ended


def launch_packets(
    kernel: Any, memory: PeerMemory, tensors: Sequence[Tensor], most: int,
    dtypes: tuple[torch.dtype, torch.dtype], unit: int, mean: bool, config: UpdatePacketsConfig, site: int,
    compile_only: bool, **constants: Any,
) -> None:  # fmt: skip
    """A step by a kernel of packets. tensors: of the kernel, up to the master weights; constants: those that
    only this kernel has; all else as `launch_update_packets` takes it."""
    world, most = memory.world, max(most, 1)
    programs = min(memory.programs, int(triton.next_power_of_2((world - 1) * most)))
    launch(
        kernel, programs, compile_only,
        *tensors, memory.packets.addresses, memory.state,
        most, programs, 1 / world if mean else 1.0, memory.rank, site, memory.packets.half(torch.int64),
        W=world, GRAD=KINDS[dtypes[0]], PARAM=KINDS[dtypes[1]], UNIT=unit,
        SOURCES=triton.next_power_of_2(world), num_warps=config.warps, num_stages=1, **constants,
    )  # fmt: skip
