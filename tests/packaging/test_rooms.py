"""Imports point one way, one step at a time: autofuse -> passes -> lowering -> native_kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "passes": ("autofuse.passes", "autofuse.lowering"),
    "lowering": ("autofuse.lowering", "autofuse.native_kernels"),
    "native_kernels": ("autofuse.native_kernels",),
}
EVERYWHERE = ("autofuse.config", "autofuse.lowering.torch_internals")


def imports(file: Path) -> Iterator[str]:
    """The full names that a module imports from this package; relative imports stay in their folder."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("autofuse."))


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_step(room: str) -> None:
    allowed = (*ALLOWED[room], *EVERYWHERE)
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for name in imports(file)
        if not any(name == a or name.startswith(f"{a}.") for a in allowed)
    ]
    assert not wrong, "\n".join(wrong)
