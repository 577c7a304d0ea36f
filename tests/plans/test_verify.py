"""The verifier rejects broken plans, and says where they are broken."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autofuse.lowering.orders import make_plan
from autofuse.lowering.plan import (
    FAMILIES,
    Compute,
    Copy,
    Plan,
    Reduce,
    Send,
    Signal,
    Store,
    Wait,
)
from autofuse.lowering.verify import verify

VARIANTS = [(op, order, False) for op in FAMILIES for order in ("ring", "direct", "oblivious")]
VARIANTS += [("matmul_all_reduce", "direct", True)]
Chunks = tuple[tuple[int, int], ...]
Actions = list[Any]  # of plan.Action, to be changed freely


def make_plans(op: str, order: str, chunks: Chunks = ((4, 2),) * 3, one_shot: bool = False) -> list[Plan]:
    world = len(chunks)
    return [make_plan(op, order, world, rank, chunks, (2, 2), one_shot) for rank in range(world)]


def acting(plans: list[Plan], rank: int, actions: Actions) -> list[Plan]:
    """`plans` with other actions for one rank."""
    return [*plans[:rank], replace(plans[rank], actions=tuple(actions)), *plans[rank + 1 :]]


def edited(plans: list[Plan], rank: int, edit: Callable[[Actions], object]) -> list[Plan]:
    """`plans` with the actions of one rank changed in place by `edit`."""
    actions = list(plans[rank].actions)
    edit(actions)
    return acting(plans, rank, actions)


def first(actions: Actions, kind: type, **fields: object) -> int:
    """The position of the first action of a kind whose fields have these values."""
    return next(
        i
        for i, action in enumerate(actions)
        if isinstance(action, kind) and all(getattr(action, k) == v for k, v in fields.items())
    )


def without(kind: type, **fields: object) -> Callable[[Actions], object]:
    return lambda actions: actions.pop(first(actions, kind, **fields))


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_no_action_can_be_dropped(op: str, order: str, one_shot: bool) -> None:
    plans = make_plans(op, order, one_shot=one_shot)
    verify(plans)
    actions = list(plans[1].actions)
    for position in range(len(actions)):
        with pytest.raises(AssertionError):
            verify(acting(plans, 1, actions[:position] + actions[position + 1 :]))


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_no_work_can_be_done_twice(op: str, order: str, one_shot: bool) -> None:
    plans = make_plans(op, order, one_shot=one_shot)
    actions = list(plans[1].actions)
    for position, action in enumerate(actions):
        if not isinstance(action, Wait):
            with pytest.raises(AssertionError):
                verify(acting(plans, 1, [*actions[:position], action, *actions[position:]]))


def test_dropped_signal() -> None:
    broken = edited(make_plans("matmul_all_reduce", "direct"), 2, without(Signal, dest=0))
    with pytest.raises(
        AssertionError, match=r"rank 0 .*Wait\(step=3, source=2, slot=0\): this wait never ends"
    ):
        verify(broken)


@pytest.mark.parametrize(
    ("op", "order", "kind"),
    [
        ("matmul_reduce_scatter", "direct", Reduce),
        ("matmul_all_reduce", "direct", Copy),
        ("matmul_all_reduce", "ring", Compute),
        ("all_gather_matmul", "direct", Compute),
        ("all_gather_matmul", "ring", Send),
        ("all_to_all_expert_matmul", "direct", Compute),
    ],
)
def test_wait_after_the_work_that_needs_it(op: str, order: str, kind: type) -> None:
    def swap(actions: Actions) -> None:
        pairs = enumerate(pairwise(actions))
        at = next(i for i, (a, b) in pairs if isinstance(a, Wait) and isinstance(b, kind))
        actions[at], actions[at + 1] = actions[at + 1], actions[at]

    broken = edited(make_plans(op, order), 1, swap)
    with pytest.raises(AssertionError, match=r"rank 1 in call 0 .*of tile .*(not, or no longer|no signal)"):
        verify(broken)


def test_missing_tile() -> None:
    broken = edited(make_plans("matmul_all_reduce", "direct"), 0, without(Copy))
    with pytest.raises(AssertionError, match=r"rank 0 in call 0 at the end: missing or not wanted: 1.0"):
        verify(broken)


def test_missing_contribution() -> None:
    def skip(actions: Actions) -> None:
        at = first(actions, Compute, step=1)
        actions[at] = replace(actions[at], step=0)

    broken = edited(make_plans("matmul_reduce_scatter", "ring"), 1, skip)
    with pytest.raises(AssertionError, match=r"the contributions of ranks .* are missing"):
        verify(broken)


def test_signal_before_its_store() -> None:
    def hurry(actions: Actions) -> None:
        actions.insert(0, actions.pop(first(actions, Signal)))

    broken = edited(make_plans("embedding_bag_all_to_all", "direct"), 0, hurry)
    with pytest.raises(AssertionError, match=r"rank 1 .*(not, or no longer|no signal orders)"):
        verify(broken)


def test_wrong_destination() -> None:
    def divert(actions: Actions) -> None:
        at = first(actions, Compute, dest=2)
        actions[at] = replace(actions[at], dest=0)

    broken = edited(make_plans("expert_matmul_all_to_all", "direct"), 1, divert)
    with pytest.raises(AssertionError, match=r"rank 2 in call 0 at the end: tile 2.0 .* not, or no longer"):
        verify(broken)


def test_early_overwrite() -> None:
    """Rank 1 has nothing to give, so rank 0 would get the data right, but must not run ahead."""
    plans = make_plans("all_gather_matmul", "direct", ((4, 2), (0, 2)))
    verify(plans)
    broken = edited(edited(plans, 0, without(Wait)), 1, without(Signal))
    with pytest.raises(AssertionError, match=r"rank 0 in call 2 .*rank 1 may still use the buffer of call 0"):
        verify(broken)


def test_ignorance_of_a_peer_that_gives_and_takes_nothing() -> None:
    plans = make_plans("embedding_bag_all_to_all", "direct", ((0, 2), (0, 2)))
    verify(plans)
    broken = edited(edited(plans, 0, without(Wait)), 1, without(Signal))
    with pytest.raises(AssertionError, match="nothing tells that rank 1 has begun the call"):
        verify(broken)


def test_wait_cycle() -> None:
    def wait_first(actions: Actions) -> None:
        actions.insert(0, actions.pop(first(actions, Wait)))

    plans = make_plans("embedding_bag_all_to_all", "direct", ((2, 2), (2, 2)))
    with pytest.raises(AssertionError, match="never ends"):
        verify(edited(edited(plans, 0, wait_first), 1, wait_first))


def test_more_peers_than_the_order_promises() -> None:
    plans = make_plans("matmul_reduce_scatter", "oblivious")
    direct = make_plans("matmul_reduce_scatter", "direct")
    claims = [replace(plan, order=direct[0].order) for plan in plans]
    with pytest.raises(AssertionError, match="2 peers meet at one rank in direct order"):
        verify(claims)


def test_ranks_that_disagree() -> None:
    plans = make_plans("matmul_reduce_scatter", "direct")
    other = make_plans("matmul_reduce_scatter", "direct", ((2, 2),) * 3)
    with pytest.raises(AssertionError, match="rank 1: chunks is"):
        verify([plans[0], other[1], plans[2]])
    with pytest.raises(AssertionError, match="plan 0 is for rank 1"):
        verify([plans[1], plans[0], plans[2]])
    with pytest.raises(AssertionError, match="1 plans for a world of 3"):
        verify(plans[:1])


@pytest.mark.parametrize(("kind", "op"), [(Compute, "matmul_reduce_scatter"), (Send, "all_gather_matmul")])
def test_store_mode_that_contradicts_the_destination(kind: type, op: str) -> None:
    def contradict(actions: Actions) -> None:
        at = first(actions, kind, store=Store.LOCAL)
        actions[at] = replace(actions[at], store=Store.REMOTE)

    broken = edited(make_plans(op, "direct"), 1, contradict)
    with pytest.raises(
        AssertionError, match=r"rank 1 .*of tile 1.0.* the store is remote but the destination is rank 1"
    ):
        verify(broken)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
def test_ranks_visit_alike(op: str) -> None:
    plans = [make_plan(op, "direct", 2, rank, ((4, 2),) * 2, (2, 2), visit=1 + rank) for rank in range(2)]
    with pytest.raises(AssertionError, match="visit is 2, on rank 0 it is 1"):
        verify(plans)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
def test_no_action_can_be_dropped_from_turns(op: str) -> None:
    plans = [make_plan(op, "direct", 3, rank, ((6, 2),) * 3, (2, 2), visit=1) for rank in range(3)]
    verify(plans)
    actions = list(plans[1].actions)
    for position in range(len(actions)):
        with pytest.raises(AssertionError):
            verify(acting(plans, 1, actions[:position] + actions[position + 1 :]))
