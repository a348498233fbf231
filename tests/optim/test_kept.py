"""What a torch.optim optimizer keeps beside tensors shaped as its parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.optim import from_torch
from tests.covering import covered
from tests.optim.cases import trained
from tests.optim.torch_cases import Clipped, GroupAdam, by_torch, parameters
from tests.oracle import linear_loss
from tests.strategies import everywhere, integers, same

XS = integers((4, 2), 7)
run = partial(trained, loss=linear_loss)


class Sgd(torch.optim.Optimizer):
    """p - lr g f, with a factor f that `factor` finds, and keeps something for."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                p.sub_(group["lr"] * self.factor(p, group) * p.grad)

    def begin(self, group: dict[str, Any]) -> None:
        """Before the parameters of a group."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 1.0


class Estimates(Sgd):
    """As Prodigy: one number for all parameters, found from all gradients so far."""

    def begin(self, group: dict[str, Any]) -> None:
        squares = sum(float(p.grad.square().sum()) for p in group["params"])
        group["d"] = group.get("d", 0.0) + squares

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 1 / (1 + group["d"])


class Norms(Sgd):
    """As NovoGrad: one number for each parameter, found from its gradients so far."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        state = self.state[p]
        if not state:
            state.update(squares=torch.zeros((), dtype=p.dtype), last=0.0, nothing=None)
        state["squares"] += p.grad.square().mean()
        state["last"] = float(p.grad.norm())  # to be looked at
        return 1 / (1 + state["squares"].sqrt())


class Largest(Sgd):
    """As AMSGrad, for the norm of a parameter's gradient."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        state = self.state[p]
        state["norm"] = 0.5 * state.get("norm", 0.0) + float(p.grad.norm())
        state["largest"] = max(state.get("largest", 0.0), state["norm"])
        return 1 / (1 + state["largest"])


class InAttribute(Sgd):
    count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 1 / self.count


class InState(Sgd):
    """As MADGRAD."""

    def begin(self, group: dict[str, Any]) -> None:
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1)  # type: ignore[index]
        self.state["k"] += 1  # type: ignore[index]

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 1 / self.state["k"].item()  # type: ignore[index]


class Flag(Sgd):
    """It notes that it was called, as bitsandbytes' optimizers do."""

    ready = False

    def begin(self, group: dict[str, Any]) -> None:
        self.ready = True


class Warms(Sgd):
    def begin(self, group: dict[str, Any]) -> None:
        group["lr"] = 1.1 * group["lr"]


class Lists(Sgd):
    def begin(self, group: dict[str, Any]) -> None:
        group["rates"] = [*group.get("rates", []), group["lr"]]


class Twice(Sgd):
    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        self.state[p]["step"] = group["step"]
        return 1 / group["step"]


class Routes(Sgd):
    """As timm's Muon: it notes which parameters it takes for matrices."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        state = self.state[p]
        if not state:
            state["matrix"] = p.ndim > 1
        return 1 / p.grad.norm() if state["matrix"] else 1.0


class Quantized(Sgd):
    """As torchao's: state of a class of its own, for large parameters."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        average = torch.zeros_like(p)
        self.state[p]["average"] = average if p.numel() < 4096 else average.as_subclass(Coded)
        return 1.0


class Coded(torch.Tensor):
    """8-bit numbers, say."""


class Anchored(Sgd):
    """It pulls to the values from which training began."""

    def __init__(self, params: Any, lr: float = 0.05, *, late: bool = False) -> None:
        super().__init__(params, lr)
        self.late = late
        for p in () if late else self.param_groups[0]["params"]:
            self.state[p]["anchor"] = p.detach().clone()

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        anchor = self.state[p].setdefault("anchor", p.detach().clone())
        p.grad += p - anchor
        return 1.0


class Evaluates(Sgd):
    """As schedule-free optimizers."""

    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.zero_()


def found(optimizer: Any, ranks: int, **options: Any) -> tuple[Any, Any]:
    xs = integers((4, ranks), 7)
    params = parameters(torch.float64)
    made = optimizer(params.values()) if isinstance(optimizer, type) else optimizer
    needs = "leaf" if optimizer in (Norms, Largest, Routes) else None
    got, state = run(params, from_torch(made, needs=needs), xs, **options)
    return got, state


@covered(ranks=[1, 2], cls=[Estimates, Norms, Largest, Flag])
def test_at_stage_0_they_are_kept(cls: Callable[..., Any], ranks: int) -> None:
    got, _ = found(cls, ranks, stage=0)
    want = by_torch(parameters(torch.float64), integers((4, ranks), 7), lambda of: cls(of.values()))
    everywhere(got, want, ranks)


def test_what_is_noted_of_a_shape_is_kept_for_a_group_of_such_shapes() -> None:
    def grouped(of: Any) -> Routes:
        paths = [[path for path in of if (of[path].ndim > 1) is yes] for yes in (True, False)]
        return Routes([{"params": [of[path] for path in some]} for some in paths])

    params, xs = parameters(torch.float64), integers((4, 3), 7)
    ours = from_torch(grouped(params), needs="leaf")
    got, _ = run(params, ours, xs, stage=2)
    everywhere(got, by_torch(parameters(torch.float64), xs, grouped), 3)


def test_a_copy_of_the_parameters_is_made_in_the_first_step() -> None:
    params, xs, made = parameters(torch.float64), integers((4, 3), 7), partial(Anchored, late=True)
    for source in (made, made(params.values())):
        got, _ = run(params, from_torch(source), xs, stage=3)
        everywhere(got, by_torch(parameters(torch.float64), xs, lambda of: made(of.values())), 3)
    with pytest.raises(LayoutError, match="Anchored makes anchor"):
        from_torch(Anchored).bind(params)


@pytest.mark.parametrize("cls", [Estimates, Clipped])
def test_parts_of_the_parameters_do_not_give_them(cls: Any) -> None:
    with pytest.raises(LayoutError, match="is not elementwise, and does not update each"):
        found(cls, 2, stage=2)


def test_the_numbers_of_a_group_are_in_the_state_and_the_instance_is_as_it_was() -> None:
    params = parameters()
    instance = GroupAdam(params.values())
    _, state = run(params, from_torch(instance), XS, stage=2)
    assert state.optimizer.counters["step"][0].tolist() == [4, 4]
    assert "step" not in instance.param_groups[0]
    assert instance.param_groups[0]["largest"].tolist() == [0.0]
    options = state.setup.optimizer.param_groups(state.setup.layout.leaves, 4).options
    assert options == ({"lr": 0.05},)


def test_training_goes_on_with_the_number_of_a_group(tmp_path: Path) -> None:
    params, ours = parameters(torch.float64), from_torch(partial(Estimates, lr=0.05))
    _, state = run(params, ours, XS, stage=0)
    save(tmp_path, state)
    alone = load(tmp_path, fzero.init(params, ours, stage=0))
    got, _ = run(params, ours, XS[:, 0], stage=0, state=alone)
    xs = torch.cat([XS, XS[:, :1].expand(4, 2)])
    same(got, by_torch(params, xs, lambda of: Estimates(of.values())))


class NormsOfAll(Norms):
    """The same, with a clip by the norm of all parameters: none can be updated alone."""

    def begin(self, group: dict[str, Any]) -> None:
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)


def test_a_checkpoint_has_no_place_for_numbers_of_parameters_without_owners(tmp_path: Path) -> None:
    _, state = found(NormsOfAll, 1, stage=0)
    with pytest.raises(LayoutError, match=r"keeps squares, of another shape"):
        save(tmp_path, state)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("cls", [Estimates, Clipped])
def test_a_rule_for_all_parameters_is_not_stepped_bucket_by_bucket(cls: Any) -> None:
    params, made = parameters(), partial(cls, lr=0.05)
    ours = from_torch(made, state_dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="one bucket at a time"):
        run(params, ours, XS[:, 0], stage=0)


REFUSED: list[tuple[type[Sgd], str]] = [
    (InAttribute, r"InAttribute writes self\.count in step"),
    (InState, r"InState writes state\['k'\] in step"),
    (Warms, r"Warms writes lr \(float\) into"),
    (Lists, r"Lists writes rates \(list\) into"),
    (Twice, r"Twice writes step \(int\) into"),
    (Routes, r"another matrix [\s\S]*: 0\.0 for one of shape \(5,\), and 1\.0"),
    (Quantized, r"Quantized keeps average = Coded for a parameter"),
    (Evaluates, r"Evaluates has eval\(\)"),
]


@pytest.mark.parametrize(("cls", "text"), REFUSED)
def test_what_is_kept_elsewhere_is_refused_at_every_stage(cls: Any, text: str) -> None:
    for stage in (0, 2):
        with pytest.raises(LayoutError, match=text):
            found(cls, 2, stage=stage)
