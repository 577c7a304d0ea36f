"""The checks before a graph changes: of the group and the device of a collective, and of every match.

A matcher makes the checks of its own pattern. All ranks must decide alike, so that a check depends only on
values that are equal on all ranks.
"""

from __future__ import annotations

from torch import fx

from autofuse.lowering import torch_internals
from autofuse.lowering.cpu import support as cpu
from autofuse.lowering.cpu.workspaces import decline
from autofuse.lowering.gpu import support as gpu
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.orders import make_plan

from .graph.anchors import OPAQUE, Anchor
from .graph.follow import tensor
from .graph.paths import all_below, fixed_above, is_fixed, move_behind, nodes_between
from .matchers import matchers_of
from .matchers.match import Match
from .reasons import Reason, Reject
from .settings import Settings


def check_metadata(anchors: list[Anchor]) -> None:
    """ValueError if a collective that could be fused has no `meta["val"]`."""
    for anchor in anchors:
        if tensor(anchor.node) is None and matchers_of(anchor.kind):
            raise ValueError(
                f'{anchor.node.name} has no meta["val"]: run FakeTensorProp on the graph before fusing it'
            )


def group_size(anchor: Anchor) -> int | Reject:
    """The number of ranks of the group, if the group is known and a pattern has the collective."""
    if anchor.node.target in OPAQUE:
        unread = f"an argument of {anchor.kind} is no constant, or has no role and not its default"
        return Reject(Reason.UNSUPPORTED_VARIANT, unread)
    if not matchers_of(anchor.kind):
        instead = ": exchange one tensor, or a flat buffer" if anchor.kind.endswith("_coalesced") else ""
        return Reject(Reason.NO_COMPUTE, f"no fused op replaces {anchor.kind}{instead}")
    if anchor.problem:
        return Reject(Reason.GROUP_UNKNOWN, anchor.problem)
    if anchor.known_group is None:
        unknown = f"the group is an input of the graph, {anchor.group}, that was none while it was traced"
        return Reject(Reason.GROUP_UNKNOWN, unknown)
    world = torch_internals.group_world(anchor.known_group)
    return Reject(Reason.GROUP_UNKNOWN, f"there is no group {anchor.group!r}") if world is None else world


def check_place(anchor: Anchor, world: int) -> Reject | None:
    """Why no fused op runs on the device or in the group of `world` ranks; None if fused ops run.

    Other ranks may not see a reason that lies in the machine of this rank. `decline` then tells them.
    """
    val = tensor(anchor.node)
    assert val is not None
    assert anchor.known_group is not None
    if world == 1:
        return Reject(Reason.SINGLE_RANK, "the group has one rank")
    if val.device.type != "cpu" and (why := gpu.why_not(val.device)) is not None:
        return Reject(Reason.NO_KERNEL_FOR_DEVICE, why)
    if val.device.type == "cuda" and world > gpu.MOST_RANKS:
        return Reject(
            Reason.NO_KERNEL_FOR_DEVICE, f"the group has {world} ranks, kernels serve {gpu.MOST_RANKS}"
        )
    if torch_internals.inductor_option("cpp_wrapper"):
        # It treats an op that returns a list of one tensor as an op that returns the tensor, and crashes.
        return Reject(Reason.UNSUPPORTED_VARIANT, "Inductor's cpp_wrapper cannot call fused ops")
    if val.device.type == "cpu" and not cpu.available():
        decline(anchor.known_group, cpu.why_not())
        return Reject(Reason.NO_NATIVE_KERNELS, cpu.why_not())
    if torch_internals.group_spans_hosts(anchor.known_group):
        decline(anchor.known_group, "the group spans hosts", val.device.type)
        return Reject(Reason.GROUP_SPANS_HOSTS, "its ranks do not share memory")
    return None


def check_match(anchor: Anchor, match: Match, settings: Settings, world: int) -> Reject | None:
    """Why a match is not legal; None if it is."""
    if settings.patterns is not None and match.pattern not in settings.patterns:
        return Reject(
            Reason.PATTERN_DISABLED, f"{match.pattern} is not among {', '.join(sorted(settings.patterns))}"
        )
    device = tensor(anchor.node).device  # type: ignore[union-attr]
    if device.type == "cuda" and (reject := _check_gpu_kernels(match)) is not None:
        return reject
    for node in match.inputs:
        val = tensor(node)
        if val is not None and val.device != device and val.dim():
            return Reject(Reason.MIXED_DEVICES, f"{node.name} is on {val.device}, the collective on {device}")
    try:
        make_plan(match.pattern, settings.order, world, 0, ((1, 1),) * world, (1, 1))
    except ValueError as error:  # a ring with more stages than a plan has signal slots
        return Reject(Reason.UNSUPPORTED_VARIANT, str(error))
    return _check_sequence(anchor.node, match)


def _check_sequence(node: fx.Node, match: Match) -> Reject | None:
    """Why the fused op would change places with another collective, or be computed from itself; None if
    neither.

    An input that a later collective computes is computed so on all ranks: they run the same program.
    """
    for user in match.early:
        if not {user, *all_below([user])}.isdisjoint(match.inputs):
            return Reject(
                Reason.EXTRA_USERS, f"{user.name} reads the product, and leads to an input of the op"
            )
    for entry in match.inputs:
        above = fixed_above(entry, node) if node < entry else None
        if above is not None:
            return Reject(Reason.EXTRA_USERS, f"{entry.name} depends on {above.name}, which cannot move")
    return None


def late_readers(node: fx.Node, match: Match) -> list[fx.Node] | None:
    """The nodes that move behind the collective, in this order, since readers of the product will read the
    fused op. None if these readers need a product of their own.

    Ranks may read a product differently, and one of them may hand it to a collective of a group that the
    other ranks are not in. So no reader keeps a site from being fused.
    """
    first = min((user for user in match.early if user < node), default=None)
    if first is None:
        return []
    is_free = not any(map(is_fixed, nodes_between(first, node)))
    if is_free and all(fixed_above(entry, first) is None for entry in match.inputs):
        return []  # the op moves before the readers
    return move_behind(match.early, node)


def _check_gpu_kernels(match: Match) -> Reject | None:
    """Why the GPU kernels of the op do not run the site; None if they do."""
    op = FUSED_OPS[match.pattern]
    if why := op.gpu_gap(match.arguments) or match.not_on_gpus:
        return Reject(Reason.NO_KERNEL_FOR_DEVICE, why)
    if match.arguments is not None and (why := op.gpu_dtype_gap(match.arguments)):
        return Reject(Reason.DTYPE, why)
    return None
