"""Each planted fault is named: its operation, its parameter, its rank, the step where it shows."""

from __future__ import annotations

import pytest

import fzero
from tests.tools.diff.faults import FAULTS


@pytest.mark.filterwarnings("ignore:what (grad_and_reduce|apply_gradients) returned was not used")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    fault = FAULTS[name]
    found = fzero.diff(*fault.runs())
    assert found is not None
    assert found.operation == fault.named, found
    assert found.at.step == fault.step, found
    assert fault.path in (None, found.path), found
    assert fault.ranks in (None, found.ranks), found
    if fault.ranks:
        assert found.rank == fault.ranks[0]
