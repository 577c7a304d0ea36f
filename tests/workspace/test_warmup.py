"""`autofuse.warmup`: the workspace of a group is there before the first call."""

import logging
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import autofuse
from autofuse import warm_up
from autofuse.lowering.cpu import workspaces
from autofuse.lowering.cpu.workspace import Workspace
from autofuse.lowering.torch_internals import fake_store
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _warm(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    autofuse.warmup(group)
    made = workspaces._workspaces[group]
    assert isinstance(made, Workspace)
    with patch.object(workspaces, "_make", Mock(side_effect=AssertionError("made again"))):
        autofuse.warmup(group.group_name)
        y = autofuse.ops.matmul_all_reduce(torch.ones(2, 4), torch.ones(4, 3), group=group)
    assert workspaces._workspaces[group] is made
    torch.testing.assert_close(y, torch.full((2, 3), 4.0 * world))
    autofuse.warmup()
    dist.destroy_process_group(group)


def test_the_workspace_is_made_once(ranks: Ranks) -> None:
    ranks(2).run(_warm)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group first"):
        autofuse.warmup()


def test_a_group_that_shares_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        with caplog.at_level(logging.WARNING):
            autofuse.warmup()
        with pytest.raises(ValueError, match="no process group called 'nobody'"):
            autofuse.warmup("nobody")
    finally:
        dist.destroy_process_group()
    assert "run unfused: the group is fake" in caplog.text


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cpu:gloo,cuda:gloo", False), ("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)],
)
def test_gpus_count_where_the_group_has_a_backend_for_them(config: str, expected: bool) -> None:
    with (
        patch.object(warm_up, "resolve_group"),
        patch.object(dist, "get_backend_config", return_value=config),
        patch.object(torch.cuda, "is_available", return_value=True),
    ):
        assert warm_up.has_gpus("0") == expected
