"""Of many cases of a test the fast tier has a few: see `tiers.py`."""

import pytest

from .tiers import leave_to_full_tier


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_full_tier(items)
