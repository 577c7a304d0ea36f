"""Processes that see the entry points of pyproject.toml, whatever is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_with_entry_point(folder: Path, arguments: list[str | Path], **environment: str) -> str:
    """What `python *arguments` prints. `folder`: gets the metadata of an installed package."""
    declared = re.search(
        r'^\[project\.entry-points\."(torch\.backends)"\]\n(\w+) = "(.*)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert declared is not None
    metadata = folder / "autofuse-0.1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: autofuse\nVersion: 0.1.0\n")
    group, name, target = declared.groups()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
