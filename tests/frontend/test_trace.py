"""Graphs and decisions in torch's structured trace, which tlparse shows beside Inductor's own artifacts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import autofuse
from autofuse.lowering import torch_internals
from tests.frontend.models import both_ways, operands


def main() -> None:
    """What the traced process runs: one graph forward, one backward."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    x, w = operands(requires_grad=True)
    with autofuse.config.patch(policy="always"):
        autofuse.explain(both_ways, backward=True)(x, w, dist.group.WORLD.group_name)


def artifacts(folder: Path) -> list[tuple[str, int | None, str]]:
    """(name, frame, content) of our artifacts, in the order of the log: a record, then its tabbed payload."""
    (log,) = folder.glob("*.log")
    found: list[tuple[str, int | None, list[str]]] = []
    ours = False
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if ours:
                found[-1][2].append(line[1:])
            continue
        record = json.loads(line[line.index("{") :])
        name = record.get("artifact", {}).get("name", "")
        ours = name.startswith("autofuse_")
        if ours:
            found.append((name, record.get("frame_id"), []))
    return [(name, frame, "\n".join(lines)) for name, frame, lines in found]


def test_every_graph_has_three_artifacts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from tests.frontend.test_trace import main; main()"]
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = artifacts(tmp_path)
    names = ["autofuse_before", "autofuse_after", "autofuse_decisions"]
    assert [(name, frame) for name, frame, _ in found] == [(name, 0) for name in names * 2]
    before, after, decisions = (content for _, _, content in found[:3])
    assert "_c10d_functional.all_reduce(" in before
    assert "autofuse.matmul_all_reduce" in after
    assert "_c10d_functional.all_reduce(" not in after
    assert decisions.startswith("autofuse: 1 fused (not yet run), 0 kept in 1 graph")
    assert "forward 0" in decisions
    assert "backward 0" in found[-1][2]


def test_nothing_is_printed_for_a_trace_that_is_not_written() -> None:
    assert not torch_internals.structured_log_on()
