"""Through how many functions of fzero a parameter and its gradient go in one step.

    python benchmarks/stays.py --path

Each element of one parameter has a number that nothing else has, and so has its gradient. While a
step of a plain state runs on rank 0 of two virtual ranks, every call of a function of fzero is
looked at (sys.setprofile): it makes a stay if an argument has that number, be it the tensor, a
flat that it is in, or a list of those, and another one if a call returns it. A return is a stay in
a call that had the value before.

Not counted are functions that hand on a record with the value in it, as a state; that answer a
question about it (their result is True, a number or a list of those); what a collective does
inside; and those of the rooms that are not on the way: virtual ranks, errors, and the rule of the
optimizer.

The fewer, the less a reader has to know to see what becomes of a tensor. `--path` prints them in
order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import fzero
from fzero.adapter import Engine
from fzero.ranks.virtual import run_ranks

_FZERO = str(Path(fzero.__file__).parent)
_EXPRESSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # parts of functions
_VALUE, _INPUT, _FACTOR, _RATE = 1009.0, 7.0, 3.0, 0.125
_GRADIENT = _INPUT * _FACTOR
PARAMETER = {_VALUE - n * _RATE * _GRADIENT for n in range(4)}
"""What an element of the parameter is before and after each of the steps."""
GRADIENT = {_GRADIENT * share for share in (0.5, 1.0, 2.0)}
"""What one of its gradient is: of a rank, divided by the number of ranks, summed over them."""


_ROOMS = ("state", "collectives", "machine", "transforms", "adapter")
_ON_THE_WAY = tuple(f"{_FZERO}/{room}/" for room in _ROOMS)
_COLLECTIVES = f"{_FZERO}/collectives/"


class Stay(NamedTuple):
    """That a function has the value now."""

    call: FrameType
    function: str
    returned: bool  # into a call that had it before
    depth: int


class Watch:
    """Notes which calls are given a value with one of some numbers, or get it from another call."""

    def __init__(self, numbers: set[float]) -> None:
        self.stays: list[Stay] = []
        self._numbers = torch.tensor(sorted(numbers))
        self._had: list[FrameType] = []  # kept, so that none is taken for another

    @contextmanager
    def running(self) -> Any:
        """Look at the calls of this thread in the block."""
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call" and _is_function(frame):
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            resumed = any(frame is one for one in self._had)
            if not resumed and any(self._has(frame.f_locals.get(name)) for name in names):
                self._stay(frame)
        elif event == "return" and _is_function(frame):
            caller = _caller(frame)
            if caller is not None and self._has(result):
                self._stay(caller)
            elif _is_answer(result):
                self.stays = [x for x in self.stays if x.call is not frame]

    def _stay(self, frame: FrameType) -> None:
        returned = any(frame is one for one in self._had)
        self._had += [] if returned else [frame]
        place = Path(frame.f_code.co_filename).relative_to(_FZERO).with_suffix("")
        name = f"{place}.{frame.f_code.co_qualname}"
        self.stays.append(Stay(frame, name, returned, _depth(frame)))

    def _has(self, x: Any, depth: int = 2) -> bool:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
                return False  # a placeholder, or what stands in p.grad, has no values
            return bool(torch.isin(x.detach(), self._numbers).any())
        if isinstance(x, dict):
            x = [*x.values()]
        return isinstance(x, list | tuple) and depth > 0 and any(self._has(y, depth - 1) for y in x)


def _is_function(frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_filename.startswith(_ON_THE_WAY) or code.co_name in _EXPRESSIONS:
        return False
    above = frame.f_back
    return above is None or not (
        code.co_filename.startswith(_COLLECTIVES)
        and above.f_code.co_filename.startswith(_COLLECTIVES)
    )


def _is_answer(x: Any) -> bool:
    """Whether a result is a question's: True, a number, or a list of those."""
    if isinstance(x, list | tuple):
        return bool(x) and all(_is_answer(y) for y in x)
    return isinstance(x, bool | int | float | str)


def _caller(frame: FrameType) -> FrameType | None:
    """The function of fzero that gets what this one returns, if the user's code does not."""
    above = frame.f_back
    while above is not None and not _is_function(above):
        if above.f_code.co_filename == __file__:
            return None
        above = above.f_back
    return above


def _depth(frame: FrameType) -> int:
    above, depth = frame.f_back, 0
    while above is not None:
        depth += _is_function(above)
        above = above.f_back
    return depth


class Two(nn.Module):
    """Two units; what is watched is the first's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = nn.Parameter(torch.full((4,), _VALUE))
        self.other = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """A loss whose gradient by each element is a constant."""
        return loss({"watched": self.watched, "other": self.other}, x)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return a loss whose gradient by each element of `watched` is input x factor."""
    return (params["watched"] * x * _FACTOR).sum() + (params["other"] * x).sum()


def functional(stage: int) -> Callable[[], object]:
    """Return a step of a function of a state."""
    params = {"watched": torch.full((4,), _VALUE), "other": torch.ones(6)}
    held = [fzero.init(params, fzero.optim.sgd(_RATE), stage=stage)]
    x = torch.tensor(_INPUT)

    def step() -> None:
        state, _ = fzero.grad_and_reduce(loss, held[0])(x)
        held[0] = fzero.apply_gradients(state)

    return step


def engine(stage: int) -> Callable[[], object]:
    """Return a step of an engine."""
    model = Two()
    wrapped = Engine(model, torch.optim.SGD(model.parameters(), lr=_RATE), stage=stage)
    x = torch.tensor(_INPUT)

    def step() -> None:
        wrapped.backward(wrapped(x))
        wrapped.step()

    return step


def count(
    driver: Callable[[int], Callable[[], object]], stage: int, numbers: set[float]
) -> list[Stay]:
    """Return where a value is in the third step: the order of units is known by then."""

    def body(rank: int) -> list[Stay]:
        step, watch = driver(stage), Watch(numbers)
        step()
        step()
        if rank:
            step()
            return []
        with watch.running():
            step()
        return watch.stays

    return run_ranks(body, 2)[0]


def main() -> None:
    """Count for each driver, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--path", action="store_true", help="print the functions in order")
    parser.add_argument("--stage", type=int, default=3)
    options = parser.parse_args()
    values = {"parameter": PARAMETER, "gradient": GRADIENT}
    drivers = {"functional": functional, "engine": engine}
    rows = {
        (what, name): count(driver, options.stage, numbers)
        for what, numbers in values.items()
        for name, driver in drivers.items()
    }
    print(f"{f'stage {options.stage}':24} {'stays':>6} {'returns':>8} {'functions':>10}")
    for (what, name), stays in rows.items():
        returns, functions = sum(x.returned for x in stays), len({x.function for x in stays})
        print(f"{f'{what}, {name}':24} {len(stays):6} {returns:8} {functions:10}")
    for (what, name), stays in rows.items() if options.path else ():
        print(f"\n{what}, {name}")
        for x in stays:
            print("  " * x.depth + ("<- " if x.returned else "") + x.function)


if __name__ == "__main__":
    main()
