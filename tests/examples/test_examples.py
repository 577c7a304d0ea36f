"""The examples as users start them, on 2 ranks: they agree with eager, and report what was fused."""

import importlib
import os
import re
import signal
import subprocess
import sys
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.passes.harness import passes_only
from tests.ranks import RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAIN = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SMALL = ("--steps=2", "--rounds=0", "--policy=always")
TIME_LIMIT_S = 200


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs to the end, ranks included: none may be left behind, whatever the outcome."""
    mark = f"AUTOFUSE_TEST_RUN={uuid.uuid4()}"
    name, value = mark.split("=")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_") and k != "RANK"}
    environment |= {name: value, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)
        assert not processes_with(mark), "processes are left behind"
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
    return done


def processes_with(mark: str) -> list[int]:
    """Processes with `mark` in their environment, but for Inductor's compile workers, which end alone."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes()
        except OSError:  # it has ended, or is somebody else's
            continue
        if mark.encode() in environment.split(b"\0") and b"compile_worker" not in command:
            found.append(int(path.name))
    return found


def output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fused(printed: str) -> Counter[tuple[str, str]]:
    """How often the printed report has each (kind of graph, fused op); "-" is for what was kept."""
    rows = [line.split() for line in printed.splitlines()]
    kinds = ("forward", "backward", "inference")
    in_table = (row for row in rows if len(row) > 3 and row[0] in kinds and row[1].isdigit())
    return Counter((row[0], row[3]) for row in in_table)


LLAMA = {"hidden": 128, "layers": 1, "batch": 2, "length": 16, "prompt": 4, "tokens": 4}


def llama(rank: int, world: int) -> str:
    """What the example prints, run by this process, on the graphs for which Inductor would generate code."""
    printed = StringIO()
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]), redirect_stdout(printed):
        example = importlib.import_module("llama_tp")

        def compile_each(models: Mapping[str, nn.Module], policy: str) -> dict[str, Callable[..., Any]]:
            compiled = torch.compile(models["autofuse"], backend=passes_only(policy))
            return {"eager": models["eager"], "inductor": models["inductor"], "autofuse": compiled}

        torch._dynamo.reset()
        with patch.object(example, "compile_each", compile_each):
            settings = Namespace(**LLAMA, steps=2, rounds=0, policy="always")
            example.run(settings, torch.device("cpu"))
    return printed.getvalue()


def test_llama(ranks: Callable[[int], RankPool]) -> None:
    check_llama(ranks(2).run(llama, timeout=200)[0])


@pytest.mark.full
def test_llama_as_users_start_it() -> None:
    sizes = [f"--{name}={value}" for name, value in LLAMA.items()]
    check_llama(output(run([*PLAIN, EXAMPLES / "llama_tp.py", *SMALL, *sizes])))


def check_llama(printed: str) -> None:
    layers = LLAMA["layers"]
    assert fused(printed) == {
        ("forward", "matmul_all_reduce"): 2 * layers + 1,  # o_proj, down_proj; the embedding
        ("forward", "matmul_all_gather"): 1,  # lm_head
        ("backward", "matmul_all_reduce"): 5 * layers + 1,  # q, k, v, gate, up; lm_head
        ("inference", "matmul_all_reduce"): 2 * layers + 1,
        ("inference", "matmul_all_gather"): 1,
    }
    assert "losses: 2 compared" in printed
    assert "tokens: 1 compared, relative error 0.0e+00" in printed


@pytest.mark.full  # test_llama decodes, too
def test_llama_serving() -> None:
    sizes = ("--hidden=128", "--intermediate=448", "--heads=4", "--kv-heads=2", "--layers=1", "--prompt=8")
    found = fused(output(run([*PLAIN, EXAMPLES / "llama_serving.py", *sizes, *SMALL])))
    # The embedding and two matmuls of a layer: of the prefill, and of a decoded token.
    assert found["inference", "matmul_all_reduce"] == 6


@pytest.mark.parametrize(
    "start", [pytest.param(PLAIN, id="plain", marks=pytest.mark.full), pytest.param(TORCHRUN, id="torchrun")]
)
def test_dlrm(start: Sequence[str]) -> None:
    sizes = ("--batch=64", "--tables=3", "--rows=100", "--dim=16", "--pooling=4")
    printed = output(run([*start, EXAMPLES / "dlrm.py", *SMALL, *sizes, f"--rounds={int(start is PLAIN)}"]))
    assert fused(printed) == {
        ("forward", "embedding_bag_all_to_all"): 1,
        ("backward", "all_to_all_embedding_bag_backward"): 1,
    }
    assert "gradients: 11 compared" in printed  # 3 tables, 4 linear layers with bias
    _, raced, table = printed.partition("training step, median of 1")
    assert bool(raced) is (start is PLAIN)
    if raced:
        assert [line.split()[0] for line in table.splitlines()[1:4]] == ["eager", "inductor", "autofuse"]


@pytest.mark.full
@pytest.mark.parametrize("update", ["sgd", "adagrad"])
def test_dlrm_with_the_optimizer_in_the_backward(update: str) -> None:
    sizes = ("--batch=64", "--tables=3", "--rows=100", "--dim=16", "--pooling=4", "--rounds=0")
    printed = output(run([*PLAIN, EXAMPLES / "dlrm.py", *SMALL, *sizes, f"--update={update}"]))
    assert fused(printed) == {
        ("forward", "embedding_bag_all_to_all"): 1,
        ("backward", "all_to_all_embedding_bag_update"): 1,
    }
    assert "gradients: 8 compared" in printed  # 4 linear layers with bias


@pytest.mark.full  # test_dlrm starts an example alike; the sites are in tests/passes/experts.py
def test_moe() -> None:
    sizes = ("--tokens=32", "--experts=4", "--dim=32", "--hidden=64")
    assert fused(output(run([*PLAIN, EXAMPLES / "moe.py", *SMALL, *sizes]))) == {
        ("forward", "-"): 1,  # the counts
        ("forward", "all_to_all_expert_matmul"): 1,
        ("forward", "expert_matmul_all_to_all"): 1,
        ("backward", "all_to_all_expert_matmul"): 1,
        ("backward", "expert_matmul_all_to_all"): 1,
    }


DATA_PARALLEL = {"hidden": 64, "layers": 1, "batch": 2, "length": 16}


def data_parallel(rank: int, world: int, dtype: str, optimizer: str, in_backward: bool) -> str:
    printed = StringIO()
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]), redirect_stdout(printed):
        example = importlib.import_module("data_parallel")
        settings = {**DATA_PARALLEL, "dtype": dtype, "optimizer": optimizer, "in_backward": in_backward}
        example.run(Namespace(**settings, steps=3, rounds=1), torch.device("cpu"))
    return printed.getvalue()


@pytest.mark.parametrize(
    ("dtype", "optimizer", "in_backward"),
    [("float32", "AdamW", True), pytest.param("bfloat16", "LAMB", False, marks=pytest.mark.full)],
)
def test_data_parallel(
    ranks: Callable[[int], RankPool], dtype: str, optimizer: str, in_backward: bool
) -> None:
    printed = ranks(2).run(data_parallel, dtype, optimizer, in_backward)[0]
    assert ("losses: 3 compared" in printed) is (dtype == "float32")
    (before, after) = re.search(r"of a rank: ([\d,]+) bytes .* ([\d,]+) sliced", printed).groups()
    number = [int(text.replace(",", "")) for text in (before, after)]
    share = 2 if dtype == "float32" else 2 * 4 / 12  # float32 and master weights against bfloat16
    assert number[1] <= number[0] / share + 3 * 4 * 1024
    assert "training step, median of 1" in printed


def disagree(rank: int, world: int) -> None:
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        common = importlib.import_module("common")
    one = [torch.ones(2)]
    common.agree("equal", one, one, 0.0)
    for other in (torch.tensor([1.0, float("nan")]), one[0] + 0.001):
        with pytest.raises(RuntimeError, match=f"numbers of rank {rank}: relative errors"):
            common.agree("numbers", [other], one, 1e-4)


def test_disagreement_is_an_error(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(disagree)


@pytest.mark.full
def test_disagreement_on_any_rank_fails(tmp_path: Path) -> None:
    script = tmp_path / "disagree.py"
    script.write_text(
        "from argparse import ArgumentParser\n"
        "import torch, torch.distributed as dist\n"
        "from common import agree, launch\n"
        "def run(args, device):\n"
        "    one = [torch.ones(2)]\n"
        "    agree('equal', one, one, 0.0)\n"
        "    try:\n"
        "        agree('NaN', [torch.tensor([1.0, float('nan')])], one, 1e-4)\n"
        "        raise SystemExit('NaN passes for 1')\n"
        "    except RuntimeError:\n"
        "        pass\n"
        "    agree('numbers', [one[0] + 0.001 * dist.get_rank()], one, 1e-4)\n"
        "    dist.barrier()\n"
        "launch(ArgumentParser(), run)\n"
    )
    done = run([*PLAIN, script])
    assert done.returncode != 0
    assert "numbers of rank 1: relative errors" in done.stderr
    assert "equal: 1 compared" in done.stdout
