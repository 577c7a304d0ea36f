"""The kernel of the examples: it runs in Triton's interpreter on 2 processes, and compiles for a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/peer_kernel.py"
TIME_LIMIT_S = 120


def start(world: int, code: str = "main()") -> subprocess.CompletedProcess[str]:
    """`code`, in the namespace of the example, on `world` interpreted ranks."""
    program = f"import runpy; g = runpy.run_path({str(EXAMPLE)!r}); exec({code!r}, g)"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    command = (sys.executable, *torchrun, f"--nproc-per-node={world}", "--no-python")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_kernel", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_it_gathers(world: int) -> None:
    done = start(world, "main(count=5001, block=1024, calls=5)")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(world):
        assert f"rank {rank}: 5 calls, {world} x 5001 numbers, as expected" in done.stdout
    assert not list(Path("/dev/shm").glob("peer_kernel-*"))


def test_it_compiles_for_a_gpu_and_signals_after_it_has_stored() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "out": "*fp32", "memory": "*i64", "state": "*i64", "rank": "i32"}
    constants = {"COUNT": 100_000, "BLOCKS": 25, "W": 4, "BLOCK": 4096}
    kernel = example().all_gather
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    steps = re.findall(r"st\.global|bar\.sync|red\.release\.sys|ld\.acquire\.sys|ld\.global", ptx)
    signal, wait = steps.index("red.release.sys"), steps.index("ld.acquire.sys")
    barrier = max(i for i in range(signal) if steps[i] == "bar.sync")
    assert "st.global" in steps[:barrier]
    assert "st.global" not in steps[barrier:signal]
    assert signal < wait
    assert "bar.sync" in steps[wait:]
