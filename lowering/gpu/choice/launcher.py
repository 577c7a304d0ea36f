"""Launches the kernel of a way, with the steps before and after the launch that all calls have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.runs import Note
from autofuse.lowering.torch_internals import current_raw_stream, empty_strided
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.gpu.prepared import Start, Values, prepare, recording, tell

from .kernel import Launch, Problem, Way

Contiguous: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a contiguous tensor."""

NOT_CAPTURED = "captured before its kernel or its memory was ready"
UNEVEN = "ranks have parts of different sizes"


def contiguous(*shape: int) -> Contiguous:
    """Shape and strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(size * strides[-1])
    return shape, tuple(reversed(strides))


class Launcher:
    """Calls of one kind at one site, in one way: `enter`, `launch`, `leave`.

    The first calls ask the workspace whether they may run. Once it has let a call in, later calls enter at
    once.

    Attributes:
        problem: what must be equal in the calls of all ranks.
        variant: the problem, and all else for which a kernel is compiled.
        need, launch: memory and launch function in place of those of the way.
        note: records for reports what has run.
    """

    def __init__(
        self,
        workspace: GpuWorkspace,
        way: Way,
        op: str,
        site: str,
        problem: Problem,
        variant: Hashable,
        need: Callable[[], Need] | None = None,
        note: Note | None = None,
        launch: Callable[..., Any] | None = None,
    ) -> None:
        if way.is_copied and workspace.serial:
            raise RuntimeError(
                f"{op}: {way.name} is not run where launches return after their kernels, as with "
                "CUDA_LAUNCH_BLOCKING=1 and under some profilers"
            )
        self._workspace, self._way, self._config = workspace, way, way.config
        self._op, self._site, self._problem, self._variant = op, site, problem, variant
        self._need = need or (lambda: way.need)
        self._launch = launch or (None if way.kernel is None else way.kernel.launch)
        self._note = note
        self._at: Launch | None = None
        self._new, self._launches = False, 0
        self._starts: dict[Hashable, Start | None] = {}
        self._telling = Lock()

    @property
    def is_short(self) -> bool:
        """Whether a launch has been recorded that `again` can repeat."""
        return self._starts.get(None) is not None

    @property
    def memory(self) -> PeerMemory:
        """The memory of the last call that has entered."""
        assert self._at is not None
        return self._at.memory

    def is_next(self) -> bool:
        """Whether the last fused call of the GPU was made on the current stream."""
        return self._workspace.again.is_last(current_raw_stream(self._workspace.device.index))

    def goes_on(self) -> bool:
        """Whether a call without a recorded launch runs as the calls before it: it is not captured, the
        current GPU is that of the group, and the settings have not changed."""
        return (
            self._workspace.again.unchanged()
            and torch.cuda.current_device() == self._workspace.device.index
            and not torch.cuda.is_current_stream_capturing()
        )

    def again(
        self, operands: Sequence[Tensor], results: Sequence[Contiguous], more: Sequence[Tensor] = (),
        dtypes: Sequence[torch.dtype] = (), form: Hashable = None, values: Values = (),
    ) -> list[Tensor] | None:  # fmt: skip
        """Repeats the launch that was recorded for `form`, on operands of the same layouts. The kernel takes
        `operands`, then the results, then `more`; this method allocates the results and returns them.

        dtypes: of the results; by default that of the first operand. values: parameters of this call. None if
        the call has to go the long way: `enter`, `launch`, `leave`."""
        start = self._starts.get(form)
        if start is None or not self._unchanged():
            return None
        if dtypes:
            out = [self._empty(*sizes, dtype) for sizes, dtype in zip(results, dtypes, strict=True)]
        else:
            out = [self._empty(*sizes, operands[0].dtype) for sizes in results]
        if out[0].get_device() != operands[0].get_device():  # the current GPU is another one
            return None
        addresses = [t.data_ptr() for t in operands]
        for t in out:
            addresses.append(t.data_ptr())
        for t in more:
            addresses.append(t.data_ptr())
        stream = current_raw_stream(self._index)
        if not values:
            return None if start(stream, *addresses) else out
        with self._telling:
            tell(start, values)
            return None if start(stream, *addresses) else out

    def starts(self, *addresses: int) -> bool:
        """Repeats the recorded launch with operands at these addresses. Returns whether it was launched; if
        not, the call has to go the long way.

        The addresses must be aligned as those of the recorded launch were."""
        start = self._starts.get(None)
        return (
            start is not None and self._unchanged() and not start(current_raw_stream(self._index), *addresses)
        )

    def enter(self, programs: int = 0, trace: Tensor | None = None) -> PeerMemory | None:
        """The memory of the call; None if the call cannot be captured, or if ranks have parts of different
        sizes.

        programs: how many programs run at once; 0 for as many as the memory says."""
        at = self._at
        if at is not None:
            memory, site = self._workspace.enter_again(), at.site
        else:
            entered = self._workspace.enter(
                self._op, self._site, self._need, self._way.name, self._variant, self._problem
            )
            if entered is None:
                if self._note is not None:
                    captured = torch.cuda.is_current_stream_capturing()
                    self._note.fell_back(NOT_CAPTURED if captured else UNEVEN)
                return None
            if self._note is not None:
                self._note.ran()
            memory, site, self._new = entered
        if programs and memory.programs != programs:
            memory = replace(memory, programs=programs)
        if at is None or at.memory is not memory or at.trace is not trace:
            self._at = Launch(memory, self._workspace.engine, site, trace, False)
        return memory

    def launch(self, *operands: Any, form: Hashable = None) -> Any:
        """What the kernel's `launch` returns. A new kernel is compiled first, and then all ranks meet.

        form: what else than the layouts of the operands decides how it is launched.
        """
        launch, at = self._launch, self._at
        assert launch is not None
        assert at is not None
        if self._new:
            self._new = False
            launch(at._replace(compile_only=True), self._config, *operands)
            self._workspace.meet("")
        self._launches += 1
        # The first launch is not recorded: a measurement makes one launch of each launcher.
        if self._launches == 1 or form in self._starts or at.trace is not None:
            return launch(at, self._config, *operands)
        with recording() as launches:
            result = launch(at, self._config, *operands)
        self._starts[form] = None
        if self._way.kernel is not None and self._way.kernel.only_launches(self._config):
            workspace = self._workspace
            self._unchanged, self._index = workspace.again.unchanged, workspace.device.index
            self._empty = empty_strided(workspace.device.type)
            self._starts[form] = prepare(launches, _tensors(operands), workspace.again.guard)
        return result

    def leave(self) -> None:
        self._workspace.leave()

    def leave_again(self) -> None:
        """Ends a call that has launched something else after `again`."""
        self._workspace.leave_again()


def _tensors(operands: Sequence[Any]) -> list[Tensor]:
    """The tensors among the operands of a launch, those in lists included."""
    lists = (each if isinstance(each, Sequence) else [each] for each in operands)
    return [t for each in lists for t in each if isinstance(t, Tensor)]
