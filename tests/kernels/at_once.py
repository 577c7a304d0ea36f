"""The programs of an interpreted kernel, run at once: threads of which one runs at a time.

A program hands over to another, drawn at random, wherever it reads or changes what others may change: at
every volatile load and every atomic. `late` draws programs that are not placed before all ranks' other
programs have ended, as if another kernel held their multiprocessors for so long.
"""

import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch.distributed as dist
import triton.language as tl
from triton._C.libtriton.ir import MEM_SEMANTIC
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

PAUSE_S = 50e-6  # what a poll leaves the processor to the ranks that compute

_here = threading.local()
_late: random.Random | None = None


class _Ended(BaseException):
    """Another program has failed."""


class _Turns:
    """Programs that run by turns; `run` returns when all have ended."""

    def __init__(self, body: Callable[[], None], programs: list[int], chance: random.Random) -> None:
        self._body, self._chance = body, chance
        self._turn = {p: threading.Semaphore(0) for p in programs}
        self._running = list(programs)
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        threads = [threading.Thread(target=self._program, args=(p,), daemon=True) for p in self._turn]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def hand_over(self) -> None:
        """Another program goes on, or the same."""
        if self._error is not None:
            raise _Ended
        if len(self._running) > 1:
            self._pass_on()
            self._turn[_here.program].acquire()

    def _pass_on(self) -> None:
        if self._running:
            self._turn[self._chance.choice(self._running)].release()
        else:
            self._over.set()

    def _program(self, program: int) -> None:
        _here.program, _here.turns, _here.grid_idx = program, self, (program, 0, 0)
        self._turn[program].acquire()
        try:
            self._body()
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._running.remove(program)
        self._pass_on()


@contextmanager
def late(seed: int) -> Iterator[None]:
    """Some programs of every launch are placed only after the others of all ranks have ended."""
    global _late
    _late = random.Random(seed)
    try:
        yield
    finally:
        _late = None


def _run(executor: Any, *args_dev: Any, **kwargs: Any) -> None:
    """As `GridExecutor.__call__`, for grids of one dimension."""
    kwargs = {k: v for k, v in kwargs.items() if k in inspect.getfullargspec(executor.fn).args}
    args_host, kwargs_host = executor._init_args_hst(args_dev, kwargs)
    args = inspect.getcallargs(executor.fn, *args_host, **kwargs_host)
    constants = executor.constexprs
    args = {k: v if k in constants else interpreter._implicit_cvt(v) for k, v in args.items()}
    (programs,) = executor.grid
    interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
    run_programs(lambda: executor.fn(**args), programs)


def run_programs(body: Callable[[], None], count: int) -> None:
    chance = _late or random.Random(count)
    order = chance.sample(range(count), count)
    placed = chance.randint(1, count) if _late else count
    _Turns(body, order[:placed], chance).run()
    if _late:
        dist.barrier()
        if placed < count:
            _Turns(body, order[placed:], chance).run()


def _patch_language() -> None:
    """Patch Triton's language once, for all kernels of this process.

    The interpreter would patch it again in every call of a device function, which takes a third of its time.
    Its checks for overflows take another third; it reads their results with the option `debug` only.
    """
    kernel = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(kernel)
    interpreter._patch_lang = lambda fn: None
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def install() -> None:
    """Patch the interpreter of this process. Waits poll with atomics that acquire, or with volatile loads."""
    _patch_language()
    load, atomic = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw
    swap = InterpreterBuilder.create_atomic_cas

    def pause(polling: bool) -> None:
        if polling:
            time.sleep(PAUSE_S)
        _here.turns.hand_over()

    def paused_load(
        self: Any,
        ptrs: Any,
        mask: Any,
        other: Any,
        cache_modifier: Any,
        eviction_policy: Any,
        is_volatile: bool,
    ) -> Any:
        if is_volatile:
            pause(True)
        return load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def paused_atomic(self: Any, op: Any, ptr: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        pause(order == MEM_SEMANTIC.ACQUIRE)
        return atomic(self, op, ptr, value, mask, order, scope)

    def paused_swap(self: Any, *args: Any) -> Any:
        pause(False)
        return swap(self, *args)

    builder: Any = InterpreterBuilder
    builder.create_masked_load, builder.create_atomic_rmw = paused_load, paused_atomic
    builder.create_atomic_cas = paused_swap
    builder.grid_idx = property(lambda self: _here.grid_idx)
    builder.set_grid_idx = None
    executor: Any = GridExecutor
    executor.__call__ = _run
