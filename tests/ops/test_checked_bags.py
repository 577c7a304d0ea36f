"""Eager calls of bags that are not checked again: only those that the checks would let through."""

from collections.abc import Callable, Iterator
from typing import TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from autofuse import checked_bags
from autofuse.checked_bags import MOST_LISTS, MOST_TRIES, checked, remember
from autofuse.ops import embedding_bag_all_to_all
from tests.passes.harness import fake_group

Lists: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]

T, DIM, BAGS = 3, 8, 4


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    with patch.object(checked_bags, "_checked", {}):
        yield


def _lists(one: bool = True) -> Lists:
    offsets = [torch.arange(0, 2 * BAGS, 2) for _ in range(T)]
    weights = [torch.randn(10, DIM) for _ in range(T)]
    return (
        weights,
        [torch.zeros(2 * BAGS, dtype=torch.int64) for _ in range(T)],
        [offsets[0]] * T if one else offsets,
    )


@pytest.mark.parametrize("one", [True, False])
def test_new_indices_need_no_check(one: bool) -> None:
    lists = weights, _, offsets = _lists(one)
    assert checked(*lists) is None
    remember(*lists)
    for n in (1, 5, 0):
        known = checked([*weights], [torch.zeros(n, dtype=torch.int64) for _ in range(T)], [*offsets])
        assert known is not None
        assert known.dims == [DIM] * T
        assert not known.is_plain  # they are not on GPUs


@pytest.mark.parametrize("remembered_with", [True, False])
def test_whether_a_gradient_is_needed_counts(remembered_with: bool) -> None:
    """Such calls take the dispatcher, whether or not the one that was checked needed gradients."""
    lists = _lists()
    with patch.object(Tensor, "is_cuda", True, create=True):
        found = remember(*lists)
        assert found is not None
        assert found.is_plain
        lists[0][1].requires_grad_()
        assert checked(*lists) is None
        with torch.set_grad_enabled(remembered_with):
            remember(*lists)
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled):
                known = checked(*lists)
                assert known is None or known.is_plain is not enabled


def _vector(lists: Lists) -> None:
    lists[0][1].data = lists[0][1].flatten()


def _other_dtype(lists: Lists) -> None:
    lists[0][2] = lists[0][2].double()


def _fewer_indices(lists: Lists) -> None:
    lists[1].pop()


def _floats(lists: Lists) -> None:
    lists[1][1] = lists[1][1].float()


def _matrix(lists: Lists) -> None:
    lists[1][1] = lists[1][1].view(2, -1)


def _fewer_bags(lists: Lists) -> None:
    lists[2][1] = lists[2][1][1:]


def _offsets_of_two_dims(lists: Lists) -> None:
    lists[2][:] = [lists[2][0].view(2, -1)] * T


WRONG = (_vector, _other_dtype, _fewer_indices, _floats, _matrix, _fewer_bags, _offsets_of_two_dims)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("spoil", WRONG)
def test_what_the_checks_refuse_is_refused_after_a_good_call(
    spoil: Callable[[Lists], None], one: bool
) -> None:
    lists = _lists(one)
    with (
        fake_group(2),
        patch("autofuse.exchange_ops.call"),
        patch("autofuse.exchange_ops.call_known") as call,
    ):
        for _ in range(2):
            embedding_bag_all_to_all(*lists)
        assert call.call_count == 2
        first, second = call.call_args_list
        assert [*map(str, first.args)] == [*map(str, second.args)]
        with pytest.raises(ValueError, match="mode"):
            embedding_bag_all_to_all(*lists, mode="median")
        with pytest.raises(ValueError, match="padding_idx"):
            embedding_bag_all_to_all(*lists, padding_idx=-3)
        spoil(lists)
        with pytest.raises(ValueError, match="embedding_bag_all_to_all"):
            embedding_bag_all_to_all(*lists)


def test_little_is_remembered() -> None:
    lists = weights, indices, offsets = _lists()
    twice = [indices[0]] * T  # never found alike
    found = [remember(weights, twice, offsets) for _ in range(MOST_TRIES + 1)]
    assert found[-2] is not None
    assert found[-1] is None
    held = [_lists() for _ in range(MOST_LISTS)]
    for each in held:
        remember(*each)
    assert len(checked_bags._checked) <= MOST_LISTS
    assert remember(*lists) is not None
    subclass = [w.as_subclass(torch.nn.Buffer) for w in weights]
    assert remember(subclass, indices, offsets) is None
