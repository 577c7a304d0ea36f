"""Real processes for tests: a pool of ranks that is started once and then runs function after function.

Ranks are forked from a server that has imported everything, so that a pool starts within a second.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

START_S = 200.0  # the server of ranks imports torch and compiles, on a loaded machine
EXIT_S = 20.0  # until the server of ranks tells how one has ended, on a loaded machine
GRACE_S = 10.0  # how long the other ranks may go on once one has failed
WAIT_S = 20.0  # how long a fused op waits for a peer, in the ranks
ONE_GPU = os.environ.get("ONE_GPU", "0") == "1"
"""Ranks share one GPU, in turns of some milliseconds, and gloo joins them: for results, not for times."""
_ENVIRONMENT = {"AUTOFUSE_TIMEOUT_S": str(WAIT_S), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class RanksFailed(RuntimeError):
    """A function failed on some ranks; the text names them and holds their tracebacks."""


class _Joined(forkserver.ForkServer):
    """A server that another process has started, and ends: `shared` is what `Server.share` told."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__()
        vars(self).update(shared, _forkserver_alive_fd=os.pipe()[1])

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


class Server:
    """Forks processes: it has imported `preload`, with `environment`, before it forks the first one."""

    def __init__(self, preload: list[str], **environment: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(["pytest", *preload])
        self._environment = environment | _ENVIRONMENT

    def share(self) -> dict[str, Any]:
        """Starts the server, if need be, for this process and those that `join` it with the result."""
        with patch.dict(os.environ, self._environment):
            self._server.ensure_running()
        names = ("_forkserver_address", "_forkserver_authkey")  # the latter from Python 3.14 on
        return {name: value for name, value in vars(self._server).items() if name in names}

    def join(self, shared: dict[str, Any]) -> None:
        """Uses the server of another process from now on."""
        self._server = _Joined(shared)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Processes of the context "forkserver" are forked from this server."""
        self.share()
        with patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            yield


COMPILING = Server(["tests.preload"])
INTERPRETING = Server(["tests.kernels.preload"], TRITON_INTERPRET="1")
"""Triton reads its variable when it is imported."""


class RankPool:
    """`world` processes joined by gloo, or by NCCL with a GPU each; forked from `server`, or else spawned.

    A function that raises, dies or runs too long discards the pool (`alive` turns false): nobody knows what
    its ranks are waiting for.
    """

    def __init__(self, world: int, server: Server | None = COMPILING, backend: str = "gloo") -> None:
        self.world = world
        self.alive = True
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        with server.in_use() if server else nullcontext():
            self._start(get_context("forkserver" if server else "spawn"), backend)
        self.pids = [process.pid for process in self._processes]
        self._collect(START_S, "start")

    def _start(self, context: Any, backend: str) -> None:
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, self._directory.name, backend, theirs),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`[fn(rank, world, *args) for rank in range(world)]`, every rank in its own process. `fn` is a
        function at the top of an importable module; `args` and results are pickled (tensors are copied)."""
        assert self.alive, "this pool was discarded after a failure; ask the `ranks` fixture for a new one"
        message = pickle.dumps((fn, args))
        for connection in self._connections:
            with suppress(OSError):  # a rank that died since is reported by _collect
                connection.send_bytes(message)
        return self._collect(timeout, f"{fn.__module__}.{fn.__qualname__}")

    def close(self) -> None:
        """End the processes."""
        self.alive = False
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()

    def _collect(self, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        pending = set(range(self.world))
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait([self._connections[r] for r in pending], left):
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                pending.discard(rank)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(EXIT_S)
                    ok, value = False, f"died with exit code {self._processes[rank].exitcode}"
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not errors and not pending:
            return [results[r] for r in range(self.world)]
        for rank in sorted(pending):
            errors[rank] = f"was still running after {timeout:g} s\n{self._stacks(rank)}"
        self.close()
        raise RanksFailed(f"{what}\n" + "\n".join(f"--- rank {r}: {errors[r]}" for r in sorted(errors)))

    def _stacks(self, rank: int) -> str:
        pid = self._processes[rank].pid
        assert pid is not None
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        self._processes[rank].kill()
        stacks = Path(self._directory.name, f"stacks-{rank}")
        return stacks.read_text() if stacks.exists() else ""


class Pools:
    """`pools(world)`: a pool that tests share; started when first asked for, replaced after a failure."""

    def __init__(self, server: Server | None = COMPILING, backend: str = "gloo") -> None:
        self._start = partial(RankPool, server=server, backend=backend)
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int) -> RankPool:
        if world not in self._pools or not self._pools[world].alive:
            self._pools[world] = self._start(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            if pool.alive:
                pool.close()


def fresh_group() -> "GroupName":
    """Name of a new group of all ranks: a test that spoils its workspace does not spoil the next one's."""
    import torch.distributed as dist

    group = dist.new_group(list(range(dist.get_world_size())))
    name: GroupName = group.group_name
    return name


def _serve(rank: int, world: int, directory: str, backend: str, connection: Connection) -> None:
    os.environ.update(_ENVIRONMENT, RANK=str(rank), WORLD_SIZE=str(world))
    # Collectives are being renamed, and the oldest torch that is supported has only the old names.
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    with open(os.path.join(directory, f"stacks-{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        connection.send_bytes(_attempt(_join, rank, world, directory, backend))
        while True:
            try:
                fn, args = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)  # the test process is done with us, or gone; peers may be gone as well
            except Exception:
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
                continue
            connection.send_bytes(_attempt(fn, rank, world, *args))


def _join(rank: int, world: int, directory: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(0 if ONE_GPU else rank)
        if ONE_GPU:
            from tests.gpu.one_gpu_ranks import share_gpu

            backend = share_gpu()
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=world)


def _attempt(fn: Callable[..., Any], *args: Any) -> bytes:
    try:
        return pickle.dumps((True, fn(*args)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
