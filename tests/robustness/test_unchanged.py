"""A script that does not name autofuse is fused on real ranks by `AUTOFUSE_ENABLE=1`, also from what a first
run left in Inductor's caches."""

from pathlib import Path

import pytest

from tests.frontend.entry_point import run_with_entry_point

SCRIPT = """
import torch, torch.distributed as dist, torch._inductor.config
import torch.distributed._functional_collectives as funcol

def model(x, v, w):
    hidden = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ v
    return funcol.reduce_scatter_tensor_autograd(hidden.relu() @ w, "sum", 0, dist.group.WORLD)

torch._inductor.config.cpp_cache_precompile_headers = False  # which takes longer than the code does
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
leaves = [torch.randint(-4, 5, (8, 8)).float().requires_grad_() for _ in range(3)]
results = []
for step in (model, torch.compile(model, fullgraph=True)):
    y = step(*leaves)
    y.square().sum().backward()
    results.append([y, *(leaf.grad for leaf in leaves)])
    for leaf in leaves:
        leaf.grad = None
assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
dist.destroy_process_group()
counts = torch._dynamo.utils.counters["inductor"]
hits, misses = counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]
print(f"hits {hits} misses {misses}\\n", end="", flush=True)  # one write: ranks share the pipe
"""


@pytest.mark.full
def test_an_unchanged_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    enabled = {
        "AUTOFUSE_ENABLE": "1",
        "AUTOFUSE_POLICY": "always",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_LOGS": "autofuse",
    }
    for expected in ("hits 0 misses 2", "hits 2 misses 0"):
        logs = tmp_path / expected.replace(" ", "_")
        out = run_with_entry_point(
            tmp_path, [*start, "--log-dir", logs, "--redirects", "2", "train.py"], **enabled
        )
        for rank in (0, 1):
            told = next(logs.rglob(f"{rank}/stderr.log")).read_text()
            assert "forward 0: 2 fused, 0 kept" in told
            assert "backward 0: " in told
            assert "0 fused" not in told
        if "hits 2" in expected:
            assert out.count(expected) == 2, out  # of both ranks, perhaps on one line
