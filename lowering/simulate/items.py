"""The actions of a plan as items: tasks for programs, what they wait for, and the signals behind them."""

from __future__ import annotations

import math
from collections.abc import Hashable

from autofuse.lowering.plan import (
    Action,
    Compute,
    Copy,
    Family,
    Plan,
    Reduce,
    Send,
    Signal,
    Store,
    Wait,
)

from .machine import Machine
from .work import Task, Work

MOST_ADDED = 2**22
"""Bytes that one helper adds up; more are shared out."""


class Block:
    """Items before some signals, which are sent when all of the items have been stored."""

    __slots__ = ("left", "signals")

    def __init__(self) -> None:
        self.left = 0
        self.signals: list[Signal] = []


class Item:
    """One of the `parts` tasks of an action: what it waits for, and the block that it belongs to."""

    __slots__ = ("action", "block", "needs", "parts", "task")

    def __init__(
        self, action: Action, task: Task, parts: int, needs: tuple[Hashable, ...], block: Block
    ) -> None:
        self.action, self.task, self.parts, self.needs, self.block = action, task, parts, needs, block


class Items:
    """The items of one rank: `queue` for its programs, in order, and `beside` for its helpers.

    An item waits for signals `(source, slot)`, for tiles of its own rank `("tile", chunk, index)`, or for
    parts that are read from peers `("part", chunk, index)`. A block in the queue has signals without items.
    """

    def __init__(self, plan: Plan, machine: Machine, work: Work, stepped: bool) -> None:
        self.plan, self.machine, self.work = plan, machine, work
        self.queue: list[Item | Block] = []
        self.beside: list[Item] = []
        self.parts: dict[Hashable, int] = {}
        """The number of tasks of every computed tile."""
        self._steps: dict[int, list[Hashable]] = {}
        """If stepped: all signals that are awaited in a step."""
        if stepped:
            for action in plan.actions:
                if isinstance(action, Wait):
                    self._steps.setdefault(action.step, []).append((action.source, action.slot))
        self._prepare()

    @property
    def count(self) -> int:
        return len(self.beside) + sum(isinstance(item, Item) for item in self.queue)

    def _prepare(self) -> None:
        block, waits, before = Block(), [], None
        for action in self.plan.actions:
            if isinstance(action, Wait):
                waits = [*waits, self._key(action)] if isinstance(before, Wait) else [self._key(action)]
            elif isinstance(action, Signal):
                block.signals.append(action)
            else:
                if block.signals:
                    self._close(block)
                    block = Block()
                if isinstance(action, Reduce) and not isinstance(before, Reduce):
                    block = Block()  # signals behind sums tell of the sums alone
                self._add(action, waits, block if self._told(action) else Block())
            before = action
        self._close(block)

    def _add(self, action: Action, waits: list[Hashable], block: Block) -> None:
        needs = self._needs(action, waits)
        if needs and action.step in self._steps:
            needs = tuple(self._steps[action.step])
        tasks = self._tasks(action)
        block.left += len(tasks)
        items = [Item(action, task, len(tasks), needs, block) for task in tasks]
        if isinstance(action, Send | Reduce | Copy) and self.machine.helpers:
            self.beside += items
        else:
            self.queue += items
        if isinstance(action, Compute):
            self.parts[action.tile.chunk, action.tile.index] = len(tasks)

    def _close(self, block: Block) -> None:
        if not block.left and block.signals:
            self.queue.append(block)

    def _told(self, action: Action) -> bool:
        """Whether signals tell peers of the action."""
        if isinstance(action, Copy):
            return False
        return not isinstance(action, Compute) or self.plan.family not in (Family.GATHER, Family.CONSUME)

    @staticmethod
    def _key(wait: Wait) -> Hashable:
        return wait.source, wait.slot

    def _needs(self, action: Action, waits: list[Hashable]) -> tuple[Hashable, ...]:
        plan = self.plan
        match action:
            case Compute(step, tile, _, Store.UPDATE):
                return tuple(waits) if step and not self.machine.tracker else ()
            case Compute(_, tile) if plan.family is Family.CONSUME and tile.chunk != self.plan.rank:
                return tuple(waits)
            case Compute(_, tile) if plan.family is Family.GATHER and tile.chunk != self.plan.rank:
                return (("part", tile.chunk, tile.index),) if plan.pulls else tuple(waits)
            case Send(_, tile) if (
                plan.family in (Family.REDUCE, Family.PUBLISH) and tile.chunk == self.plan.rank
            ):
                return (("tile", tile.chunk, tile.index),)
            case Send() if plan.family is not Family.CONSUME:
                return tuple(waits)
            case Reduce(_, tile):
                return (*waits, ("tile", tile.chunk, tile.index))
            case Copy(_, tile):
                return tuple(waits)
        return ()

    def _tasks(self, action: Action) -> tuple[Task, ...]:
        nbytes = (
            float(action.tile.size * self.work.itemsize) if not isinstance(action, Signal | Wait) else 0.0
        )
        match action:
            case Compute(step, tile, _, store):
                tasks = self.work.tasks(self.plan, tile)
                if store is Store.UPDATE and step and not self.machine.tracker:
                    # The program reads what arrived, and adds it.
                    part = nbytes / len(tasks)
                    return tuple(Task(t.operations, (*t.reads, (None, part)), t.moved + part) for t in tasks)
                return tasks
            case Reduce() if self.plan.one_shot:
                return (Task(reads=((None, nbytes),), moved=nbytes),)
            case Reduce():
                whole = nbytes * self.plan.world
                parts = max(1, math.ceil(whole / MOST_ADDED))
                return (Task(reads=((None, whole / parts),), moved=whole / parts),) * parts
        return (Task(),)
