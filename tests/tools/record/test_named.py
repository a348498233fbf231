"""Where two steps part, the first module, parameter and rank are named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fzero
from tests.tools.record.runs import batch, recorded, rule


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.norm, self.out = nn.Linear(3, 5), nn.LayerNorm(5, eps=eps), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.head(x)))


def step_of(net: nn.Module, stage: int = 2, **options: Any) -> Any:
    apply, params = fzero.functionalize(net.double())

    def step_fn(state: Any, x: Tensor, *, factor: float) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: factor * apply(p, x).square().mean(), state)()
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(step_fn, stage=stage, **options), world_size=2)
    return step, step.init(params, rule())


def run(net: nn.Module, calls: int = 5, spoiled: int = 99, **options: Any) -> fzero.tools.Recording:
    step, state = step_of(net, **options)
    step = fzero.record(step, every=2, keep=None)
    for number in range(calls):
        x = batch(number)
        if number == spoiled:
            x[1, 2] = 0
        state, _ = step(state, x, factor=0.5)
    return step.recording


def test_another_module_is_named() -> None:
    recording = run(Net())
    elsewhere: Any = {"stage": 0, "world_size": 1}
    for options in ({}, elsewhere):
        parting = fzero.bisect(recording, step_of(Net(eps=1e-3))[0], **options)
        assert parting is not None and parting.update == 1 and parting.difference is not None
        assert parting.difference.operation.startswith("module")
        assert parting.difference.path == "norm" and "norm" in str(parting)
    against = fzero.bisect(recording, run(Net(eps=1e-3)))
    assert against is not None and against.difference is not None and against.replays == 1
    assert against.difference.path == "norm" and against.inputs == ()


def test_other_inputs_are_named_with_their_rank() -> None:
    in_two_dims: Any = {"mesh": (2, 1)}
    for options in ({}, in_two_dims):
        parting = fzero.bisect(run(Net(), spoiled=3, **options), run(Net(), **options))
        assert parting is not None and (parting.update, parting.inputs) == (4, (1,))
        assert parting.difference is not None and parting.difference.ranks == (1,)


def test_a_flipped_bit_has_no_step_that_differs() -> None:
    def spoil(number: int, state: Any, x: Tensor) -> Any:
        if number == 3:
            state.params.flats[0][1].view(torch.int64)[0] ^= 1 << 50
        return state, x

    parting = fzero.bisect(recorded(3, spoil=spoil), recorded(3))
    assert parting is not None and (parting.update, parting.ranks) == (3, (1,))
    assert parting.inputs == () and parting.difference is None


def test_a_run_to_be_compared_begins_at_a_recorded_state() -> None:
    recording = run(Net())
    again = fzero.replay(recording, step=4)

    def one(eps: float, ranks: int) -> fzero.tools.Run:
        step, _ = step_of(Net(eps))

        def step_fn(state: Any, x: Tensor) -> Any:
            return step.inner.inner(state, x, factor=0.5)

        x = batch(3).reshape(ranks, -1, 3)
        params = fzero.functionalize(Net(eps).double())[1]
        return fzero.tools.Run(
            step=fzero.shard(step_fn, stage=1), params=params, optimizer=rule(), batches=[x],
            world_size=ranks, start=again.before,
        )  # fmt: skip

    assert fzero.diff(one(1e-5, 2), one(1e-5, 1)) is None
    found = fzero.diff(one(1e-5, 1), one(1e-4, 2))
    assert found is not None and found.path == "norm"
