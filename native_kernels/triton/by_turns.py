"""Programs that send and take by turns, so that links and memory work at the same time.

    unit = first_unit(..)                        of part A, whose units need no wait
    ticket, undrawn = units, True                of what waits for peers: there are `units` tickets
    while (unit < end) | (ticket < units) | undrawn:
        if unit < end:    send unit; unit += programs; behind the last one: unit = next_share(..)
        if undrawn:       ticket, undrawn = first_ticket(unit < end, ..)
        there = ticket < units
        if unit < end:    there = whether the first words of the ticket's item are there
        if there:         take the ticket's item; draw the next ticket

A program that still sends takes an item only if its first words are there: then a program of a peer is
sending the rest, and waits for nobody meanwhile. So part A still needs no wait. The first ticket is drawn
behind the first unit: the draw takes a microsecond, in which the words of that unit travel.
"""

import triton
import triton.language as tl

from .comm import STATE_FIRM, STATE_TICKETS, draw, drawn
from .shares import STATE_STARTED, first_share, further, look, multiprocessor, stays


@triton.jit
def next_share(end, state, part: tl.constexpr, shares, program):
    """The share that `further` finds, if its number is below `end`; `end` if there is none. Shares from
    number `end` on are empty: the program takes them, and looks for another one."""
    share = further(look(state, STATE_STARTED), shares, state, part, shares, program)
    while share >= end:
        share = further(look(state, STATE_STARTED), shares, state, part, shares, program)
    return tl.where(share < 0, end, share)


@triton.jit
def first_unit(asked, end, state, part: tl.constexpr, shares, program):
    """The share that `first_share` finds, or `next_share`; `end` if there is none. Every program has a share
    of its own."""
    share = first_share(asked, state, part, shares, program, shares)
    if (share < 0) | (share >= end):
        share = next_share(end, state, part, shares, program)
    return share


@triton.jit
def first_ticket(
    sends, is_firm, state, units, rank, epoch, PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr
):
    """The first ticket of a program, and whether it has yet to draw one. Until then, and if it leaves, the
    ticket is `units`. A program of the margin draws none while it sends."""
    ticket, undrawn = units, sends & (is_firm == 0)
    if undrawn == 0:
        if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
            ticket = drawn(draw(state + STATE_TICKETS))
    return ticket, undrawn


@triton.jit
def firm_program(state, PROGRAMS: tl.constexpr, PER_SM: tl.constexpr):
    """Whether the program is none of the margin."""
    return multiprocessor(PROGRAMS // PER_SM) < tl.load(state + STATE_FIRM)
