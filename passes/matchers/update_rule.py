"""What tensors of an optimizer become by a sum over ranks: the rule, and its numbers as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from autofuse.lowering.update_rules import GUARDED, NUMBERS, UNGUARDED
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import CannotEmit, Emitter
from autofuse.passes.graph.follow import aten, dtype_of, is_view, prims, tensor
from autofuse.passes.graph.paths import all_below
from autofuse.passes.reasons import Reason, Reject

from .match import Context
from .update_algebra import (
    NARROW,
    Algebra,
    Coefficient,
    NotARule,
    Polynomial,
    before_rounding,
    equal,
    rule_of,
)
from .update_norms import NORMS, ZEROS, P, U, leads_to_norms

SCALES = (aten.mul.Tensor, aten.div.Tensor, prims.convert_element_type.default)
"""Each of these ops multiplies or divides a tensor, or casts it."""


@dataclass(frozen=True)
class Update:
    """A rule with its numbers. changed: the parameter, then states, and what they become.

    factor: what the rule takes times the sum; 1, or computed from what is reduced.
    """

    rule: str
    numbers: tuple[Coefficient, ...]
    changed: dict[fx.Node, fx.Node]
    scalars: dict[str, fx.Node]
    factor: Coefficient


Known = tuple[str, list[fx.Node], tuple[Coefficient, ...]]
"""A rule, the tensors in its order, and its numbers."""


def below(
    anchor: Anchor, also: Callable[[fx.Node], bool] = lambda node: False, ends: Set[fx.Node] = frozenset()
) -> set[fx.Node]:
    """What pointwise ops of a rule make of the sum, and nodes of which `also` is true, down to `ends`."""
    found: set[fx.Node] = set()
    work = list(anchor.results)
    while work:
        for user in work.pop().users:
            if user not in found and (rule_of(user) is not None or also(user) or user in ends):
                found.add(user)
                if user not in ends:
                    work.append(user)
    return found


def changed(anchor: Anchor, also: Callable[[fx.Node], bool] = lambda node: False) -> dict[fx.Node, fx.Node]:
    """New values by input: the inputs of the graph that are overwritten (`copy_`) with what pointwise ops and
    nodes for which `also` is true make of the sum. Not among them is a parameter of 16 bits that is rounded
    from a master weight that is: the op updates the master weight, and the cast stays in the graph."""
    by_sum = below(anchor, also)
    copies = anchor.node.graph.find_nodes(op="call_function", target=aten.copy_.default)
    pairs = [(to, new) for to, new in (n.args[:2] for n in copies) if isinstance(new, fx.Node)]
    pairs = [(to, new) for to, new in pairs if before_rounding(new) in by_sum]
    pairs = [(to, new) for to, new in pairs if not _is_multiple(anchor, new)]
    values = {new for _, new in pairs}
    return {
        to: new
        for to, new in pairs
        if isinstance(to, fx.Node) and to.op == "placeholder"
        if new in by_sum or before_rounding(new) not in values
    }


def _is_multiple(anchor: Anchor, node: object) -> bool:
    """Whether the node is a copy or a multiple of the sum, such as that which becomes the gradient."""
    while isinstance(node, fx.Node) and node not in anchor.results:
        if node.target is aten.copy.default:
            node = node.args[1]
            continue
        of = [n for n in node.all_input_nodes if (val := tensor(n)) is not None and val.dim()]
        if len(of) != 1 or node.target not in SCALES:
            return False
        (node,) = of
    return node in anchor.results


def check_update(anchor: Anchor, context: Context, becomes: dict[fx.Node, fx.Node]) -> Reject | None:
    """Why no fused op can update the keys of `becomes` by what is reduced, whatever the rule."""
    if anchor.reduce_op not in ("sum", "avg"):
        return Reject(Reason.REDUCE_OP, f"the reduction is {anchor.reduce_op!r}")
    if isinstance(context.group, fx.Node):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the group is a value of the graph")
    if context.order == "ring":
        return Reject(Reason.UNSUPPORTED_VARIANT, "sums before an update are in rank order")
    given = [val.shape for node in anchor.results if (val := tensor(node)) is not None]
    if not all(isinstance(size, int) for size in given[0]) or not given[0]:
        return Reject(Reason.UNSUPPORTED_VARIANT, "an update of tensors of no dims, or whose sizes vary")
    for node in (anchor.node, *becomes):
        val = tensor(node)
        if val is None or val.dtype not in (torch.float32, *NARROW):
            return Reject(Reason.DTYPE, f"{node.name} is updated in {val.dtype if val is not None else None}")
        if node is not anchor.node and val.shape not in given:
            return Reject(Reason.LAYOUT, f"{node.name} has another shape than what is reduced")
    if len(set(becomes.values())) < len(becomes):
        return Reject(Reason.UNSUPPORTED_VARIANT, "two tensors become one value")
    return None


def find_update(anchor: Anchor, becomes: dict[fx.Node, fx.Node]) -> Update | Reject:
    """The rule by which all of `becomes` change."""
    old = {node: f"old {node.name}" for node in becomes}
    new = {value: f"new {node.name}" for node, value in becomes.items()}
    by_sum = all_below([anchor.node])
    algebra = Algebra({**dict.fromkeys(anchor.results, "g"), **old, **new}, by_sum.__contains__)
    factor: Coefficient = 1.0
    reject, numbers = None, ()
    try:
        left = _polynomials(algebra, becomes)
        late = {s for s, node in algebra.scalars.items() if node in by_sum}
        left, factor = _without_factor(left, late)
        rule, order, numbers = _adam(algebra, left, becomes) if algebra.second else _sgd(left)
    except NotARule as error:
        reject = Reject(Reason.UNSUPPORTED_VARIANT, f"no update of an optimizer that is known: {error}")
    scalars = algebra.scalars if reject else symbols_in(algebra.scalars, *numbers)
    scaled = next((node for node in scalars.values() if node in by_sum), None)
    if scaled is not None:
        return scaled_late(scaled, "not as clipping by a norm does it, nor by a norm that a rule has")
    if reject is not None:
        return reject
    scalars = symbols_in(algebra.scalars, *numbers, factor)
    return Update(rule, numbers, {n: becomes[n] for n in order}, scalars, factor)


def symbols_in(scalars: dict[str, fx.Node], *values: Coefficient) -> dict[str, fx.Node]:
    """Those of the scalars that are read."""
    read = {x.name for value in values for x in getattr(value, "free_symbols", ())}
    return {name: node for name, node in scalars.items() if name in read}


def scaled_late(node: fx.Node, why: str) -> Reject:
    """The node is computed from sums that are to be reduced before any tensor is updated."""
    by = f"{node.name}, by which the update is scaled, is computed from what is reduced"
    return Reject(Reason.UNSUPPORTED_VARIANT, f"{by}: {why}")


def _polynomials(algebra: Algebra, becomes: dict[fx.Node, fx.Node]) -> dict[fx.Node, Polynomial]:
    """What each tensor becomes. Raises NotARule."""
    left: dict[fx.Node, Polynomial] = {}
    late: list[fx.Node] = []
    for node, value in becomes.items():
        scalars = dict(algebra.scalars)
        try:
            left[node] = _polynomial(algebra, node, value)
        except NotARule:
            late.append(node)  # a parameter: its divisor needs the second moment
            algebra.scalars = scalars
    second = [n for n, of in left.items() if ("g", "g") in of]
    _need(len(second) <= 1, f"{len(second)} tensors change by squares")
    if second:
        algebra.second = f"new {second[0].name}"
    for node in late:
        left[node] = _polynomial(algebra, node, becomes[node])
    return left


def _polynomial(algebra: Algebra, node: fx.Node, value: fx.Node) -> Polynomial:
    """Raises NotARule, also where the tensor is written without being read, as the momentum of a first step:
    a rule reads it all the same, and times 0 what was never written may be no number."""
    algebra.read.clear()
    found = algebra.of(before_rounding(value), root=True)
    _need(f"old {node.name}" in algebra.read, f"{node.name} does not depend on what it was")
    return found


def _without_factor(
    left: dict[fx.Node, Polynomial], late: set[str]
) -> tuple[dict[fx.Node, Polynomial], Coefficient]:
    """The polynomials of the sum times a factor, which is computed from what is reduced, and that factor."""
    factor: Coefficient = 1.0
    symbols = [sympy.Symbol(name, real=True) for name in late]
    for of in left.values():
        value = sympy.sympify(of.get(("g",), 0.0))
        if value.has(*symbols) if symbols else False:
            factor = value.as_independent(*symbols, as_Add=False)[1]
    if factor == 1.0:
        return left, factor
    divided = {
        node: {k: value / factor ** k.count("g") if "g" in k else value for k, value in of.items()}
        for node, of in left.items()
    }
    return divided, factor


def is_read(anchor: Anchor, ends: Set[fx.Node]) -> bool:
    """Whether anything but what leads to `ends` reads the sum: new values, or what else the op returns."""
    inside = below(anchor, lambda node: leads_to_norms(node) or is_view(node), ends)
    needed: set[fx.Node] = {*anchor.results}
    work = [*ends]
    while work:
        for above in work.pop().all_input_nodes:
            if above in inside and above not in needed and above not in ends:
                needed.add(above)
                work.append(above)
    return any(user not in needed and user not in ends for node in needed for user in node.users)


def _only(of: Polynomial, *keys: tuple[str, ...]) -> list[Coefficient]:
    """The coefficients of `keys`; NotARule if there are others."""
    if not of.keys() <= set(keys):
        raise NotARule("a term of no rule: " + " ".join(next(k for k in of if k not in keys)))
    return [of.get(key, 0.0) for key in keys]


def _divided(a: Coefficient, b: Coefficient, what: str = "decay") -> Coefficient:
    """a / b; NotARule where a number that the program computes, such as a rate, could be a divisor of 0."""
    found = sympy.cancel(a / b) if isinstance(a / b, sympy.Expr) and (a / b).free_symbols else a / b
    _need(not sympy.fraction(found)[1].free_symbols, f"a {what} of {found}")
    return found


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise NotARule(why)


def _adam(algebra: Algebra, left: dict[fx.Node, Polynomial], becomes: dict[fx.Node, fx.Node]) -> Known:
    _need(len(left) == 3, f"{len(left)} tensors change, of them one by squares")
    (v,) = (n for n in left if f"new {n.name}" == algebra.second)
    param = [n for n in left if any("Q" in key for key in left[n])]
    _need(len(param) == 1 and algebra.quotient is not None, "no parameter is divided by a root")
    (p,) = param
    (m,) = (n for n in left if n not in (p, v))
    old_p, old_m, old_v = (f"old {n.name}" for n in (p, m, v))
    keep1, take1, decayed = _only(left[m], (old_m,), ("g",), (old_p,))
    _need(not equal(keep1, 1.0), "the first moment is no mean")
    _need(take1 != 0, "the first moment does not depend on the sum")
    # Both moments may be of a multiple of the sum, such as its mean by a division.
    scale = 1.0 if equal(keep1 + take1, 1.0) else _divided(take1, 1.0 - keep1, "scale")
    take1, decay = take1 / scale, decayed * scale / take1
    keep2, take2, mixed, of_square = _only(
        left[v], (old_v,), ("g", "g"), tuple(sorted(("g", old_p))), (old_p, old_p)
    )
    take2, mixed = take2 / scale**2, mixed / scale
    fits = equal(mixed, 2 * take2 * decay) and equal(of_square, take2 * decay * decay)
    _need(fits, "moments of different gradients")
    quotient = tuple(sorted(("Q", f"new {m.name}")))
    keep, step = _only(left[p], (old_p,), quotient)
    assert algebra.quotient is not None
    moments = (take1, keep2, take2, *algebra.quotient)
    if algebra.direction is None:
        return "adam", [p, m, v], (keep, decay, *moments, -step, 0.0, 0.0, scale, 0.0)
    _need(decay == 0, "a decay of the gradient besides a trust ratio")
    value = before_rounding(becomes[p])
    return "lamb", [p, m, v], (*_lamb(algebra, value, old_p, quotient, moments), scale, 0.0)


def _lamb(
    algebra: Algebra, value: fx.Node, old_p: str, quotient: tuple[str, ...], moments: tuple[Coefficient, ...]
) -> tuple[Coefficient, ...]:
    """The row but for its last two numbers. value: what becomes of the parameter."""
    assert algebra.direction is not None
    _need(algebra.measured == old_p, "the norm of another tensor than the parameter")
    first, decay = _only(algebra.direction, quotient, (old_p,))

    def scale(norms: tuple[Coefficient, Coefficient]) -> sympy.Expr:
        algebra.norms = norms
        keep, step = _only(algebra.of(value, root=True), (old_p,), quotient)
        _need(norms is not NORMS or equal(keep, 1.0 + step / first * decay), "a decay that is in no norm")
        return sympy.sympify(-step / first)

    trust = scale(NORMS)
    limited = next((m for m in trust.atoms(sympy.Min) if P in m.args and len(m.args) == 2), None)
    most = math.inf if limited is None else next(a for a in limited.args if a != P)
    lr = sympy.expand(trust * U / (P if limited is None else limited))
    _need(not {*NORMS} & lr.free_symbols, f"a trust ratio of {trust}")
    at_zeros = [scale(norms) for norms in ZEROS]
    guarded = all(at.is_finite is not False and equal(at, lr) for at in at_zeros)
    divided = at_zeros[0].is_zero and at_zeros[1:] == [sympy.zoo, sympy.nan]
    _need(guarded or divided, f"a trust ratio of {trust} that is {at_zeros} where norms are 0")
    return most, decay, *moments, first, lr, GUARDED if guarded else UNGUARDED


def _sgd(left: dict[fx.Node, Polynomial]) -> Known:
    if len(left) == 1:
        ((p, of),) = left.items()
        keep, step = _only(of, (f"old {p.name}",), ("g",))
        _need(step != 0, "the parameter does not depend on the sum")
        return "sgd", [p], (-step, _divided(keep - 1, step), *(0.0,) * 8, 1.0, 0.0)
    _need(len(left) == 2, f"{len(left)} tensors change")
    found = [n for n, of in left.items() for o in left if o is not n and (f"new {o.name}",) in of]
    _need(len(found) == 1, "no tensor changes by another")
    (p,) = found
    (m,) = (n for n in left if n is not p)
    old_p, old_m = f"old {p.name}", f"old {m.name}"
    m_keep, take, decayed = _only(left[m], (old_m,), ("g",), (old_p,))
    _need(take != 0, "the momentum does not depend on the sum")
    decay = _divided(decayed, take)
    keep, of_g, of_m = _only(left[p], (old_p,), ("g",), (f"new {m.name}",))
    _need(equal(keep, 1.0 + of_g * decay), "a decay that is in no gradient")
    return "momentum", [p, m], (1.0, decay, m_keep, take, -of_g, -of_m, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def numbers_of(emitter: Emitter, values: Sequence[Coefficient], scalars: dict[str, fx.Node]) -> fx.Node:
    """The rows of a rule (`lowering.update_rules`), or other numbers, as a vector on the device of the sum.

    No value leaves the device, so that nobody waits for it; one on the host is an argument of a kernel.
    """
    if _is_host(_device(emitter)):
        return emitter.call(aten.cat.default, [number_of(emitter, value, scalars) for value in values])
    rows = [values[at : at + NUMBERS] for at in range(0, len(values), NUMBERS)]
    vectors = [_chosen_by_place(emitter, row, scalars) for row in rows]
    return vectors[0] if len(vectors) == 1 else emitter.call(aten.cat.default, vectors)


def _chosen_by_place(emitter: Emitter, values: Sequence[Coefficient], scalars: dict[str, fx.Node]) -> fx.Node:
    """A vector in pointwise ops alone, which Inductor makes one kernel of: a cat of many is many kernels."""
    place = emitter.numbers(len(values), emitter.anchor)
    total = _full(emitter, [len(values)], 0.0)
    for i, value in enumerate(values):
        if _is_known(value) and float(value) == 0.0:
            continue
        here = emitter.call(aten.eq.Scalar, place, i)
        total = emitter.call(aten.where.self, here, _of_no_dims(emitter, value, scalars), total)
    return total


def number_of(emitter: Emitter, value: Coefficient, scalars: dict[str, fx.Node]) -> fx.Node:
    """A coefficient as a tensor of one element."""
    if _is_known(value):
        return _full(emitter, [1], float(value))
    return emitter.call(aten.reshape.default, _of_no_dims(emitter, value, scalars), [1])


def _of_no_dims(emitter: Emitter, value: Coefficient, scalars: dict[str, fx.Node]) -> fx.Node:
    if _is_known(value):
        return _full(emitter, [], float(value))
    return emitter.cast(_scalar(emitter, value, scalars), torch.float32)


def _is_known(value: Coefficient) -> bool:
    return not isinstance(value, sympy.Expr) or bool(value.is_number)


def _device(emitter: Emitter) -> torch.device:
    val = tensor(emitter.anchor)
    assert val is not None
    return val.device


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _full(emitter: Emitter, shape: Sequence[int], fill: float) -> fx.Node:
    return emitter.full(shape, fill, emitter.anchor, torch.float32)


def _scalar(emitter: Emitter, value: sympy.Expr, scalars: dict[str, fx.Node]) -> fx.Node:
    """An expression in tensors of no dims."""
    if isinstance(value, sympy.Symbol):
        node = scalars[value.name]
        # Tensors are scaled in float32, by one factor after the other, whatever dtypes these have.
        narrow = dtype_of(node) not in (torch.float32, torch.float64)
        return emitter.cast(node, torch.float32) if narrow else node
    if isinstance(value, sympy.Abs):
        return emitter.call(aten.abs.default, _scalar(emitter, value.args[0], scalars))
    if isinstance(value, sympy.Pow) and value.exp.is_number:
        base = _scalar(emitter, value.base, scalars)
        return emitter.call(aten.pow.Tensor_Scalar, base, float(value.exp))
    if not isinstance(value, (sympy.Mul, sympy.Add)):
        raise CannotEmit(f"{value} is no sum, product or power")
    target = aten.mul.Tensor if isinstance(value, sympy.Mul) else aten.add.Tensor
    of_numbers = [float(a) for a in value.args if a.is_number]
    nodes = [_scalar(emitter, a, scalars) for a in value.args if not a.is_number]
    total = nodes[0]
    for other in [*nodes[1:], *of_numbers]:
        total = emitter.call(target, total, other)
    return total
