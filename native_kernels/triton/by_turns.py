"""Programs that send and take by turns, so that links and memory work at the same time.

    unit = first_unit(..)                        of part A, whose units need no wait
    ticket, may_leave = first_ticket(..)         of what waits for peers
    while (unit < end) | (ticket < units) | may_leave:
        if unit < end:    send unit; unit += programs; behind the last one: unit = next_share(..)
        elif may_leave:   ticket, may_leave = ticket_of_margin(..)
        there = ticket < units
        if unit < end:    there = whether the first words of the ticket's item are there
        if there:         take the ticket's item; draw the next ticket

A program that still sends takes an item only if its first words are there: then a program of a peer is
sending the rest, and waits for nobody meanwhile. So part A still needs no wait.
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
def first_ticket(state, units, PROGRAMS: tl.constexpr, PER_SM: tl.constexpr):
    """The first ticket of a program, and whether it is of the margin. Then it has none yet, which is
    `units`."""
    ticket = units
    firm = multiprocessor(PROGRAMS // PER_SM) < tl.load(state + STATE_FIRM)
    if firm:
        ticket = drawn(draw(state + STATE_TICKETS))
    return ticket, firm == 0


@triton.jit
def ticket_of_margin(
    state, units, rank, epoch, PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr
):
    """The first ticket of a program of the margin that has sent everything, if it stays; and False."""
    ticket = units
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        ticket = drawn(draw(state + STATE_TICKETS))
    return ticket, tl.full((), False, tl.int1)
