"""What lies outside of the recorded program: it is refused, or printed as an assumption.

These steps are false in another process, at another call, or on another launcher. Those that write
to a tensor they keep are refused.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.descends import descends
from tests.tools.prove.adversary.places import Fn, mean_gradients, own_gradients, stepped
from tests.tools.prove.adversary.programs import Program, hidden, usual_loss

KIND = "outside"
_WRITTEN = "written constants"


def _world_of_torch() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _by(number: Callable[[], float]) -> Callable[[], Fn]:
    return lambda: descends(lambda p, x: usual_loss(p, x) * number())


def _seeded(p: Any, x: Tensor) -> Tensor:
    torch.manual_seed(fzero.axis_index() + 1)
    return usual_loss(p, x * torch.rand(x.shape))


def _counting() -> Fn:
    calls = [0]

    def loss(p: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return usual_loss(p, x) * (fzero.axis_size() if calls[0] > 100 else 1)

    return descends(loss)


def _forked(p: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(fzero.axis_size())
        return usual_loss(p, x * torch.rand(x.shape))


class _Module(nn.Module):
    """Counts its own calls in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.first = 0, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) * (self.calls if self.calls > 50 else 1)


def _default(seen: list[int] = []) -> float:  # noqa: B006
    seen.append(1)
    return len(seen) if len(seen) > 50 else 1.0


# Numbers of the process, of the launcher, of the call: (a new step)
OUTSIDE: dict[str, Callable[[], Fn]] = {
    "an environment variable": _by(lambda: 1.0 + float(os.environ.get("RANK", "0"))),
    "the world of torch.distributed": _by(lambda: float(_world_of_torch())),
    "the clock": _by(lambda: 1.0 + time.time() % 1),
    "a random number of Python": _by(random.random),
    "the process": _by(lambda: 1.0 + os.getpid() % 7),
    "a file": _by(lambda: float(os.path.exists("/tmp/fzero-adversary-file")) + 1),
    "a default that is written": _by(_default),
    "a counter": _counting,
    "seeds of ranks": lambda: descends(_seeded),
    "seeds of worlds, and back": lambda: descends(_forked),
    "threads": _by(lambda: float(torch.get_num_threads())),
    "the default dtype": _by(lambda: 1.0 if torch.get_default_dtype() is torch.float32 else 2.0),
}


def _kept(write: Callable[[Tensor, Tensor], Any]) -> Callable[[], Fn]:
    """A loss that keeps a tensor, and writes to it."""

    def make() -> Fn:
        kept = torch.ones(4)

        def loss(p: Any, x: Tensor) -> Tensor:
            made = hidden(p, x)
            with torch.no_grad():
                write(kept, made.mean(0))
            return (made * kept).square().mean()

        return descends(loss)

    return make


def _momentum() -> Fn:
    """A momentum that is kept outside of the state."""
    kept = torch.zeros(4, 6)

    def step(state: Any, x: Tensor) -> Any:
        g = mean_gradients(state, x)
        kept.mul_(0.9).add_(g["w"])
        return stepped(state, {**g, "w": kept.clone()}, reduced=True), x.sum()

    return step


def _residual() -> Fn:
    """What a clip has cut off is added to the next gradient."""
    kept = torch.zeros(4, 6)

    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        whole = g["w"] + kept
        sent = whole.clamp(-0.1, 0.1)
        kept.copy_(whole - sent)
        return stepped(state, {**g, "w": sent}, reduced=False), x.sum()

    return step


def _normed() -> Fn:
    norm = nn.BatchNorm1d(4)  # is closed over: its statistics are written at each call
    return descends(lambda p, x: norm(hidden(p, x)).pow(3).mean() + norm.running_mean.sum())


def _calls() -> Fn:
    calls = torch.zeros(())

    def loss(p: Any, x: Tensor) -> Tensor:
        calls.add_(1)
        return usual_loss(p, x) * torch.where(calls > 100, 2.0, 1.0)

    return descends(loss)


def _into_state(state: Any, x: Tensor) -> Any:
    """Writes the own batch into the buffers of the state."""
    new = descends(usual_loss)(state, x)[0]
    with torch.no_grad():
        new.params.flats[0][:4].add_(x[0, :4])
    return new, x.sum()


WRITTEN: dict[str, Callable[[], Fn]] = {
    "add_": _kept(lambda kept, x: kept.add_(x)),
    "copy_": _kept(lambda kept, x: kept.copy_(x)),
    "mul_ and add_": _kept(lambda kept, x: kept.mul_(0.9).add_(x, alpha=0.1)),
    "a row": _kept(lambda kept, x: kept[:2].copy_(x[:2])),
    "an element": _kept(lambda kept, x: kept.__setitem__(0, x[0])),
    "fill_": _kept(lambda kept, x: kept.fill_(2.0)),
    "zero_": _kept(lambda kept, x: kept.zero_()),
    "data": _kept(lambda kept, x: kept.data.add_(x)),
    "out=": _kept(lambda kept, x: torch.add(kept, 1.0, out=kept)),
    "lerp_": _kept(lambda kept, x: kept.lerp_(x, 0.1)),
    "index_put_": _kept(lambda kept, x: kept.index_put_((torch.tensor([1, 2]),), x[:2])),
    "a view": _kept(lambda kept, x: kept.view(2, 2)[0].sub_(1.0)),
    "foreach": _kept(lambda kept, x: torch._foreach_add_([kept], [x])),
    "random": _kept(lambda kept, x: kept.normal_()),
    "momentum": _momentum,
    "a residual": _residual,
    "batch norm": _normed,
    "a counter": _calls,
}


def programs() -> Iterator[Program]:
    for name, make in OUTSIDE.items():
        yield Program(kind=KIND, name=name, make=make)
    for name, make in WRITTEN.items():
        yield Program(kind=_WRITTEN, name=name, make=make)
    apply, params = fzero.functionalize(_Module())
    yield Program(
        kind=KIND,
        name="a module that counts",
        make=lambda: descends(lambda p, x: apply(p, x).square().mean()),
        params=lambda: params,
    )
    yield Program(kind=_WRITTEN, name="the state", make=lambda: _into_state, options={"stage": 0})
