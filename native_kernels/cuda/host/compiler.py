"""NVRTC compiles the CUDA C++ files of `kernels/` to cubins; neither a GPU nor a CUDA toolkit is needed.

A source may include the `.cuh` files of `include/` and of its own folder, no headers of C++ or of CUDA. The
names of `native_kernels.gpu.state` are macros. Cubins are kept on disk, named by a digest of everything that
they depend on: later runs do not compile again.
"""

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from autofuse.native_kernels.gpu import state

KERNELS = Path(__file__).parents[1] / "kernels"
INCLUDE = Path(__file__).parents[1] / "include"

Constants: TypeAlias = tuple[tuple[str, int | str], ...]
"""Macros: names and values."""

_HOW = "pip install 'cuda-bindings>=13' 'nvidia-cuda-nvrtc>=13,<14' (CUDA builds of torch bring both)"


@cache
def why_not() -> str | None:
    """Why this process cannot compile CUDA C++, and what to do about it; None if it can."""
    try:
        _version()
    except ImportError as error:
        return f"CUDA kernels need the package cuda-bindings ({error}): {_HOW}"
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"CUDA kernels need NVRTC, NVIDIA's compiler, which cannot be loaded ({reason}): {_HOW}"
    return None


def compile_cubin(
    source: str, constants: Mapping[str, int | str], arch: str = "sm_90a", folder: Path = KERNELS
) -> bytes:
    """The file `source` of `folder` as machine code; `constants` are macros.

    RuntimeError with NVRTC's log if it does not compile, or with what to install where NVRTC is missing.
    """
    return _compiled(source, tuple(sorted(constants.items())), arch, folder)


@cache
def _compiled(source: str, constants: Constants, arch: str, folder: Path) -> bytes:
    if problem := why_not():
        raise RuntimeError(problem)
    text, headers, options = _inputs(source, constants, arch, folder)
    digest = sha256(repr((source, text, headers, options, _version())).encode()).hexdigest()
    found = _load(digest)
    if found is None:
        _, found = _nvrtc_compile(source, text, headers, options)
        _save(digest, found)
    return found


def compile_both(source: str, constants: Mapping[str, int | str], arch: str = "sm_90a") -> tuple[str, bytes]:
    """PTX as text, and machine code, from one compilation; for tests, which read the PTX."""
    if problem := why_not():
        raise RuntimeError(problem)
    ptx, cubin = _nvrtc_compile(source, *_inputs(source, tuple(sorted(constants.items())), arch, KERNELS))
    return ptx.rstrip(b"\0").decode(), cubin


def _inputs(
    source: str, constants: Constants, arch: str, folder: Path
) -> tuple[bytes, dict[str, bytes], list[str]]:
    """A source, its headers, and the compiler options."""
    found = [*sorted(INCLUDE.glob("*.cuh")), *sorted(folder.glob("*.cuh"))]
    headers = {path.name: path.read_bytes() for path in found}
    macros = [f"-D{name}={value}" for name, value in (*state.macros().items(), *constants)]
    # Lines for profilers and sanitizers; the code stays the same.
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "-lineinfo", *macros]
    return (folder / source).read_bytes(), headers, options


def _version() -> tuple[int, int]:
    """NVRTC's. ImportError without the bindings, RuntimeError without the library."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(str(error))
    return major, minor


def _nvrtc_compile(
    source: str, text: bytes, headers: dict[str, bytes], options: list[str]
) -> tuple[bytes, bytes]:
    """PTX and machine code."""
    from cuda.bindings import nvrtc

    def call(function: Any, *args: Any) -> Any:
        error, *results = function(*args)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source}: {function.__name__} failed: {error}")
        return results[0] if results else None

    names = [name.encode() for name in headers]
    program = call(
        nvrtc.nvrtcCreateProgram, text, source.encode(), len(headers), list(headers.values()), names
    )
    try:
        flags = [option.encode() for option in options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
            call(nvrtc.nvrtcGetProgramLog, program, log)
            said = log.rstrip(b"\0").decode(errors="replace").strip()
            raise RuntimeError(f"{source} does not compile ({' '.join(options)}): {error}\n{said}")
        ptx = bytearray(call(nvrtc.nvrtcGetPTXSize, program))
        call(nvrtc.nvrtcGetPTX, program, ptx)
        cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return bytes(ptx), bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _path(digest: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "autofuse" / "cubins" / f"{digest}.cubin"


def _load(digest: str) -> bytes | None:
    """What `_save` stored; None if it is not there, or not whole."""
    try:
        data = _path(digest).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    cubin, check = data[:-32], data[-32:]
    return cubin if sha256(cubin).digest() == check else None


def _save(digest: str, cubin: bytes) -> None:
    """Store it, followed by its own digest; other ranks do the same, and each sees all of it or nothing."""
    try:
        path = _path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except (OSError, RuntimeError):
        return  # next time it is compiled again
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin + sha256(cubin).digest())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
