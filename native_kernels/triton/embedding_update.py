"""The last step of `embedding_backward` for the complete sum of a row: store it, or update the table.

UPDATE: `Tables.update`; rule: the addresses of a table's state and of its rates, lr and eps.
"""

import triton
import triton.language as tl

from .embedding_tables import WORDS_UPDATE

RULE = tl.constexpr(WORDS_UPDATE)
ADAGRAD = tl.constexpr(2)


@triton.jit
def kept(rule, to, current, done, dim, c, in_row, UPDATE: tl.constexpr):
    """The rows `current` of the table and their states, where `done`, from which an update starts."""
    row = tl.zeros((1, 1), tl.float32)
    state = tl.zeros((1,), tl.float32)
    if UPDATE != 0:
        where = to + (current * dim)[:, None] + c[None, :]
        row = tl.load(where, mask=done[:, None] & in_row, other=0.0).to(tl.float32)
    if UPDATE == ADAGRAD:
        state = tl.load(tl.load(rule).to(tl.pointer_type(tl.float32)) + current, mask=done, other=0.0)
    return row, state


@triton.jit
def put(acc, have, rule, to, current, done, dim, c, in_row, UPDATE: tl.constexpr):
    """Where `done`, the sums of rows `current` are complete: store the sums, or the updated rows."""
    result = acc
    if UPDATE != 0:
        row, state = have
        rates = tl.load(rule + 1).to(tl.pointer_type(tl.float32))
        lr = tl.load(rates)
        if UPDATE == ADAGRAD:
            state += tl.sum(acc * acc, axis=1) / tl.maximum(dim, 1).to(tl.float32)
            tl.store(tl.load(rule).to(tl.pointer_type(tl.float32)) + current, state, mask=done)
            result = row - (lr / (tl.sqrt_rn(state) + tl.load(rates + 1)))[:, None] * acc
        else:
            result = row - lr * acc
    where = to + (current * dim)[:, None] + c[None, :]
    tl.store(where, result.to(to.dtype.element_ty), mask=done[:, None] & in_row)
