"""Compiling CUDA C++ and what a tensor map may be; no GPU is needed. `tests/gpu` launches."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autofuse.native_kernels.cuda.host import compiler, launcher
from autofuse.native_kernels.gpu import driver

HEADER = "#pragma once\nint times(int a) { return a * FACTOR; }\n"
SOURCE = '#include "times.cuh"\nextern "C" __global__ void scale(int* a) { *a = times(*a); }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources, and an empty cache beside them; skips where NVRTC is missing."""
    pytest.importorskip("cuda.bindings.nvrtc")
    if problem := compiler.why_not():
        pytest.skip(problem)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tmp_path / "sources"
    found.mkdir()
    (found / "times.cuh").write_text(HEADER)
    (found / "scale.cu").write_text(SOURCE)
    return found


def build(folder: Path, factor: int = 2) -> bytes:
    """As a process does that starts now."""
    compiler._compiled.cache_clear()
    return compiler.compile_cubin("scale.cu", {"FACTOR": factor}, folder=folder)


def stored(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache/autofuse/cubins").iterdir())


def no_compiler(*args: object) -> bytes:
    raise AssertionError("it was compiled again")


def test_a_kernel_with_a_header_and_a_constant(folder: Path) -> None:
    cubin = build(folder)
    assert cubin.startswith(b"\x7fELF")
    assert b".text.scale" in cubin
    assert build(folder, 3) != cubin


def test_a_later_process_does_not_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = build(folder)
    assert [path.suffix for path in stored(folder)] == [".cubin"]
    monkeypatch.setattr(compiler, "_nvrtc_compile", no_compiler)
    assert build(folder) == cubin


@pytest.mark.parametrize("name", ["times.cuh", "scale.cu"])
def test_a_changed_source_is_compiled(folder: Path, name: str) -> None:
    build(folder)
    path = folder / name
    path.write_text(path.read_text().replace("*a", "*  a").replace("FACTOR", "FACTOR + 1"))
    build(folder)
    assert len(stored(folder)) == 2


def test_what_is_not_whole_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = build(folder)
    (path,) = stored(folder)
    for broken in (b"", path.read_bytes()[:-100], cubin):
        path.write_bytes(broken)
        assert build(folder) == cubin
    monkeypatch.setattr(compiler, "_nvrtc_compile", no_compiler)
    assert build(folder) == cubin  # the whole one is stored again


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    (folder.parent / "cache").write_text("a file")
    assert build(folder).startswith(b"\x7fELF")


def test_an_error_has_the_log(folder: Path) -> None:
    (folder / "scale.cu").write_text(SOURCE.replace("*a =", "*b ="))
    with pytest.raises(RuntimeError, match=r'(?s)scale\.cu.*FACTOR=2.*identifier "b" is undefined'):
        build(folder)


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    caches = compiler.why_not, compiler._compiled, driver.bindings
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_missing_bindings_are_named(no_bindings: None, tmp_path: Path) -> None:
    assert "pip install 'cuda-bindings" in str(compiler.why_not())
    with pytest.raises(RuntimeError, match="need the package cuda-bindings"):
        build(tmp_path)
    with pytest.raises(RuntimeError, match="need the package cuda-bindings"):
        launcher.tensor_map(torch.zeros(64, 64, dtype=torch.float16), 64, 64)


def test_a_missing_compiler_is_named(no_bindings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.13 is nowhere")

    monkeypatch.setattr(compiler, "_version", missing)
    assert "libnvrtc.so.13 is nowhere" in str(compiler.why_not())
    assert "'nvidia-cuda-nvrtc" in str(compiler.why_not())


def test_importing_needs_no_cuda() -> None:
    program = (
        "import sys; sys.modules['cuda'] = None\n"
        "from autofuse.native_kernels.cuda.host import compiler, launcher"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[2])


MATRIX = torch.zeros(128, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("matrix", "box", "swizzle", "says"),
    [
        (MATRIX.t()[:, :64], (64, 64), 128, "row-major"),
        (MATRIX.float(), (64, 32), 128, "float32"),
        (MATRIX[:, 1:], (64, 64), 128, "begin at multiples of 16"),
        (MATRIX.flatten()[: 12 * 100].view(100, 12), (64, 8), 0, "24 bytes apart"),
        (MATRIX[:0], (64, 64), 128, "with elements"),
        (MATRIX[:1].expand(64, 128), (64, 64), 128, "overlap"),
        (MATRIX, (257, 64), 128, "up to 256"),
        (MATRIX, (64, 0), 128, "up to 256"),
        (MATRIX, (64, 128), 128, "at most 128"),
        (MATRIX, (64, 4), 0, "multiple of 16"),
        (MATRIX, (64, 64), 96, "not 96"),
    ],
)
def test_what_tma_cannot_do(matrix: torch.Tensor, box: tuple[int, int], swizzle: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launcher.tensor_map(matrix, *box, swizzle)
