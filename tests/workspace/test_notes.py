"""A rank that shares no memory of one kind may share that of another."""

import pytest
from torch.distributed import HashStore

from autofuse.lowering.cpu.rendezvous import Declined, all_gather
from autofuse.lowering.notes import declined, kept_by, place


def test_ranks_without_cpu_kernels_meet_on_gpus() -> None:
    store = HashStore()
    store.set("autofuse/declined/cpu/1", "no kernels")
    assert (declined(store, 1, "cpu"), declined(store, 1, "cuda")) == ("no kernels", "")
    with pytest.raises(Declined, match="rank 1 leaves its collectives as they are: no kernels"):
        all_gather(store, "a", 0, [None, None], "x", 1.0)
    with pytest.raises(RuntimeError, match=r"waited 0.1 s for ranks \[1\]"):
        all_gather(store, "b", 0, [None, None], "x", 0.1, "cuda")
    store.set("c/1", "y")
    assert all_gather(store, "c", 0, [None, None], "x", 1.0, "cuda") == ["x", "y"]


def test_places_of_merged_sites() -> None:
    """Each without its folder, which may have a + in its name."""
    merged = "/home/a+b/model.py:3+/home/a+b/other.py:15"
    assert place(merged) == "model.py:3+other.py:15"
    assert (place("/a/model.py:3"), place("all_reduce"), place("eager")) == (
        "model.py:3",
        "all_reduce",
        "eager",
    )
    store = HashStore()
    store.set("autofuse/kept/1", "all_reduce at model.py:3 (dtype)")
    assert "rank 1 kept all_reduce at model.py:3" in kept_by(store, 1, merged)
    assert "its report says why" in kept_by(store, 1, "/home/a+b/model.py:31")
