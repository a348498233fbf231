"""The address of a placeholder: a kernel that takes one must not read at address 0."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine


def first_by_address(x: Tensor) -> float:
    """Read the first element as a kernel does that is given an address."""
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_double))[0]


def test_the_address_of_a_placeholder_is_refused_and_that_of_a_clone_has_the_values() -> None:
    params = {"w": torch.arange(7.0, 13.0, dtype=torch.float64).view(2, 3)}

    def loss(params: Any) -> Tensor:
        w = params["w"]
        for seen in (w, w[0], w.detach(), w.data):
            message = r"address of LazyParam\(w[\s\S]*Fix: .*clone"
            with pytest.raises(fzero.LayoutError, match=message):
                first_by_address(seen)
            assert first_by_address(seen.clone()) == 7.0
        return w.sum()

    def run() -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(1.0), stage=3)
        return fzero.grad_and_reduce(loss, state)()[1]

    assert fzero.simulate(run, world_size=2)().tolist() == [57.0] * 2


class Recurrent(nn.Module):
    """A forward that was written for nn.DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(x)[0].sum()


def test_a_recurrent_module_may_flatten_its_parameters_at_stage_3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flattened: list[nn.Module] = []

    def flatten(self: nn.RNNBase) -> None:
        """What torch does first on CUDA, where alone it does something."""
        assert len({p.data_ptr() for p in self.parameters()}) == 4
        flattened.append(self)

    def run() -> Tensor:
        torch.manual_seed(1)
        module = Recurrent()
        assert flattened.count(module.rnn) == 1  # it was made
        engine = Engine(module, torch.optim.SGD, stage=3)
        engine(torch.ones(2, 1, 2, dtype=torch.float64)).backward()
        engine.module.to("cpu")  # torch flattens here, too
        engine.step()
        engine.close()
        assert flattened.count(module.rnn) == 1
        module.rnn.flatten_parameters()
        assert flattened.count(module.rnn) == 2
        return module.rnn.get_parameter("weight_ih_l0").detach()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    after = fzero.simulate(run, world_size=2)()
    assert torch.equal(after[0], after[1])
