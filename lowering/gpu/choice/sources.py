"""Short digests of the sources of kernels. A measured time holds for the sources that ran."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import torch

import autofuse.native_kernels

_ROOT = Path(autofuse.native_kernels.__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^from \.(\w+) import", re.MULTILINE)
_COMMENT = {".py": re.compile(r"#.*"), ".cu": re.compile(r"//.*"), ".cuh": re.compile(r"//.*")}


@cache
def digest_of(source: str) -> str:
    """The digest of a kernel's file under native_kernels, its launcher, and all device code that it uses.

    Comments and empty lines do not count.
    """
    found: dict[Path, str] = {}
    ahead = [_ROOT / source]
    if source.endswith(".cu"):
        ahead.append(ahead[0].with_suffix(".py"))
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        text = path.read_text()
        lines = _COMMENT[path.suffix].sub("", text).splitlines()
        found[path] = "\n".join(line.rstrip() for line in lines if line.strip())
        if path.suffix != ".py":
            ahead += (_ROOT / "cuda" / "include" / name for name in _INCLUDE.findall(text))
        elif path.parent.name == "triton":
            ahead += (path.with_name(f"{name}.py") for name in _IMPORT.findall(text))
    whole = hashlib.sha256()
    for path in sorted(found):
        whole.update(f"{path.relative_to(_ROOT)}\n{found[path]}".encode())
    return whole.hexdigest()[:12]


@cache
def libraries() -> str:
    """The version of the libraries for which a measured time of their ways holds."""
    return "torch " + ".".join(torch.__version__.split("+")[0].split(".")[:2])
