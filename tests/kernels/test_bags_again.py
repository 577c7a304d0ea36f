"""Descriptors of calls of bags that are like one before: the words of the long way, or none."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from autofuse.lowering.gpu.embedding.again import Same, Words
from autofuse.native_kernels.triton.embedding_tables import Places, Tables

Lists: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]

T, ROWS, DIM, BAGS = 5, 10, 8, 6
PLACES = Places(3, tuple(range(0, T * DIM, DIM)), 2 * T * DIM, ((0, T * DIM, 80), (40, T * DIM, 80)))


def _indices(dtype: torch.dtype = torch.int64, first: int = 12) -> list[Tensor]:
    return [torch.zeros(first + t, dtype=dtype) for t in range(T)]


def _lists(one: bool = True, dtype: torch.dtype = torch.int64) -> Lists:
    weights = [torch.randn(ROWS, DIM) for _ in range(T)]
    offsets = [torch.arange(0, 2 * BAGS, 2, dtype=dtype) for _ in range(T)]
    return weights, _indices(dtype), [offsets[0]] * T if one else offsets


def _expected(weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> bytes:
    words = Tables(weights, indices, offsets, []).words(PLACES)
    return torch.tensor(words).numpy().tobytes()


def _words(lists: Lists) -> Words:
    return Words(Tables(*lists, []), PLACES)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_indices_of_any_length(one: bool, dtype: torch.dtype) -> None:
    lists = weights, _, offsets = _lists(one, dtype)
    words = _words(lists)
    same = _indices(dtype)
    short = [torch.zeros(2 * n, dtype=dtype)[:: 2 if n == 1 else 1] for n in range(T)]  # one without gaps
    for indices in (lists[1], _indices(dtype, 3), _indices(dtype, 0), short, [same[0]] * T, same):
        assert words.of(weights, indices, offsets) == _expected(weights, indices, offsets)
        assert words.of([*weights], tuple(indices), [*offsets]) == _expected(weights, indices, offsets)


def test_tensors_of_the_same_memory() -> None:
    lists = weights, indices, offsets = _lists()
    words = _words(lists)
    for _ in range(2):
        others = [w.view(ROWS, DIM) for w in weights]
        assert words.of(others, indices, [offsets[0].view(-1)] * T) == _expected(*lists)
    assert words.of([torch.nn.Parameter(w) for w in weights], indices, offsets) == _expected(*lists)


def _moved(lists: Lists) -> None:
    lists[0][2].data = lists[0][2].clone()


def _transposed(lists: Lists) -> None:
    lists[0][1].data = lists[0][1].as_strided((ROWS, DIM), (1, ROWS))


def _smaller(lists: Lists) -> None:
    lists[0][1].data = lists[0][1][:-1]


def _another(lists: Lists) -> None:
    lists[0][0] = lists[0][0].clone()


def _viewed(lists: Lists) -> None:
    lists[0][0] = lists[0][0].view(torch.int32)


def _offset_moved(lists: Lists) -> None:
    lists[2][0].data = lists[2][0].clone()


def _offset_other(lists: Lists) -> None:
    lists[2][T - 1] = lists[2][T - 1].clone()


def _fewer(lists: Lists) -> None:
    lists[1].pop()


def _other_dtype(lists: Lists) -> None:
    lists[1][3] = lists[1][3].int()


def _all_other_dtype(lists: Lists) -> None:
    lists[1][:] = _indices(torch.int32)


def _gaps(lists: Lists) -> None:
    lists[1][4] = torch.zeros(20, dtype=torch.int64)[::2]


CHANGES = (
    _moved, _transposed, _smaller, _another, _viewed, _offset_moved, _offset_other, _fewer, _other_dtype,
    _all_other_dtype, _gaps,
)  # fmt: skip


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_tensors_go_the_long_way(change: Callable[[Lists], None], one: bool) -> None:
    lists = _lists(one)
    before = [*lists[0]], [*lists[2]]  # live on, so that no other tensor gets their memory
    words = _words(lists)
    assert words.of(*lists) == _expected(*lists)
    change(lists)
    assert words.of(*lists) is None
    assert words.of(*lists) is None
    del before


def test_tensors_are_not_kept_alive() -> None:
    lists = _lists()
    words = _words(lists)
    assert words.of(*lists) is not None
    held = [weakref.ref(t) for each in lists for t in each]
    lists[0].clear(), lists[1].clear(), lists[2].clear()
    gc.collect()
    assert not any(ref() is not None for ref in held)
    again = _lists()
    found = words.of(*again)
    assert found is None or found == _expected(*again)  # the memory may have been given again


def test_no_tensors() -> None:
    same = Same([])
    assert same.ask([])
    assert not same.ask([torch.zeros(1)])
