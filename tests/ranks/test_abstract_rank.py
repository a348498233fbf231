"""An abstract rank has sizes and no values; what it counts is that of real ones (tools/trace)."""

from __future__ import annotations

import pytest
import torch

import fzero
from fzero.context.current_rank import abstract_rank, current_ranks
from fzero.errors import AxisError


def test_values_are_refused() -> None:
    with abstract_rank(0, 3), pytest.raises(AxisError, match="3 abstract ranks was given real"):
        fzero.psum(torch.ones(2))
    with abstract_rank(1, 3):
        assert fzero.psum(torch.ones(2, device="meta")).shape == (2,)
        assert (fzero.axis_index(), fzero.axis_size()) == (1, 3)
    assert current_ranks() is None
