"""A torch.optim optimizer while an engine runs it: its hooks, its `step`, and its `state`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn
from weakref import WeakMethod

from torch import Tensor
from torch.optim import Optimizer

from fzero.errors import PhaseError
from fzero.optim import TorchOptimizer
from fzero.state import Setup

TRAINERS = (
    "Under a trainer no Engine is made: fzero.integrations has sharded(Trainer(...), stage=2) of "
    "transformers, FzeroAccelerator of accelerate, and FzeroStrategy of Fabric, which make it."
)


class Guard:
    """While an engine has an optimizer, its state_dict and load_state_dict raise.

    So does what looks into its `state`. The engine alone runs it: `optimizer.step()` is
    `engine.step()`, which is what a GradScaler that is not enabled calls.

    optimizer: of torch.optim, if there is one. clear: what `optimizer.state.clear()` does. norm: of
    the gradients of the last update, if it clipped. was_empty: whether its total weight was 0.
    engine_step: `engine.step`, once there is the engine. steps: whether that runs.
    """

    engine_step: WeakMethod[Callable[..., Any]] | None = None

    def __init__(self, optimizer: Optimizer | None, clear: WeakMethod[Callable[[], None]]) -> None:
        self.optimizer = optimizer
        self.norm: Tensor | None = None
        self.was_empty = False
        self.steps = False
        self._shown, self._own = OptimizerStateOfEngine(clear), getattr(optimizer, "state", None)
        self._handles: list[Any] = []
        self._members = _members(optimizer)
        self._step: Any = None  # in the place of `optimizer.step`
        self._step_before: Any = vars(optimizer).get("step") if optimizer is not None else None
        if optimizer is not None:
            self._step = MethodType(_step_of(self, optimizer.step), optimizer)
            self.show_state(own=False)
            self._put_step(self._step_before, self._step)
            self._handles = [
                optimizer.register_step_pre_hook(self._require_engine),
                optimizer.register_state_dict_pre_hook(_refuse_state_dict),
                optimizer.register_load_state_dict_pre_hook(_refuse_load),
            ]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The block is a step of the engine, in which the optimizer has the `step` of its own."""
        self.steps = True
        self._put_step(self._step, self._step_before)
        try:
            yield
        finally:
            self.steps = False
            self._put_step(self._step_before, self._step)
            self.show_state(own=False)

    def show_state(self, *, own: bool) -> None:
        """Let the optimizer have its own state, as for an update, or that of an engine's."""
        if self.optimizer is not None:
            self.optimizer.state = self._own if own else self._shown  # type: ignore[assignment]

    def require_same(self) -> None:
        """Raise `PhaseError` if `state` was replaced, or param groups have other parameters.

        What was added would not be stepped, and what was taken out would.
        """
        if self.optimizer is not None and self.optimizer.state is not self._shown:
            raise PhaseError(
                "optimizer.state of an optimizer that an engine runs was replaced.",
                cause="a momentum reset or a resume by an assignment: what the optimizer keeps is "
                "in engine.state, and would not have changed.",
                fix="optimizer.state.clear() begins anew; engine.set_full_optimizer_state(path, "
                "name, value) writes whole values.",
            )
        now = _members(self.optimizer)
        if now != self._members:
            before = [len(some) for some in self._members]
            raise PhaseError(
                f"the engine's optimizer has {len(now)} param groups, of {[*map(len, now)]} "
                f"parameters, and had {len(before)}, of {before}, when the engine was made.",
                cause="a new head by add_param_group(), or a parameter that was appended to a "
                "group or taken out of one.",
                fix="engine.close(), then the head, add_param_group(), and a new Engine of both, "
                "which goes on from what the optimizer keeps. To freeze a part, requires_grad_("
                "False) is enough.",
            )

    def serve(self, step: WeakMethod[Callable[..., Any]]) -> None:
        """There is the engine: `optimizer.step()` is this one."""
        self.engine_step = step

    def updates(self, *, empty: bool) -> None:
        """An update is made; whether its total weight is 0."""
        self.was_empty = empty

    def clipped(self, norm: Tensor | None) -> None:
        """Keep the norm of the gradients of the last update; None: it did not clip."""
        self.norm = norm

    def remove(self) -> None:
        """It is an ordinary optimizer again."""
        self.show_state(own=True)
        self._put_step(self._step, self._step_before)
        self.engine_step = None
        for handle in self._handles:
            handle.remove()

    def _put_step(self, old: Any, new: Any) -> None:
        """Let `optimizer.step` be `new`, None as its class has it, where it is `old`."""
        entries = {} if self.optimizer is None else vars(self.optimizer)
        if entries.get("step") is old:
            entries.pop("step", None)
            entries.update({} if new is None else {"step": new})

    def _require_engine(self, *_: Any) -> None:
        if not self.steps:
            raise PhaseError(
                f"{type(self.optimizer).__name__}.step(optimizer) of an optimizer that an engine "
                "runs.",
                cause="a `step = optimizer.step` that was taken before the Engine was made, or an "
                "engine that nobody holds any more.",
                fix="call engine.step(), or optimizer.step() as it is now.",
            )


def _step_of(guard: Guard, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `optimizer.step` is for an engine; `plain`: what it was, and is inside of it."""

    @functools.wraps(plain)  # torch's schedulers look for what they have noted there
    def step(_: Optimizer, closure: Any = None) -> Any:
        of_engine = None if guard.engine_step is None else guard.engine_step()
        given = [] if closure is None else [closure]
        if guard.steps or of_engine is None:
            return plain(*given)
        of_engine(*given)
        return None

    return step


def _members(optimizer: Optimizer | None) -> list[list[int]]:
    """Which parameters are in each param group."""
    return [] if optimizer is None else [[*map(id, g["params"])] for g in optimizer.param_groups]


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise PhaseError(
        "optimizer.state_dict() of an optimizer that an engine runs.",
        cause="saving it in the usual way: its state is sharded over the ranks, in "
        "engine.state, and one rank's part is no checkpoint. Or Accelerator.prepare(), or a "
        "Trainer(optimizers=...), that was given the engine's optimizer.",
        fix="save with fzero.checkpoint.save(path, engine.state), or take whole values: "
        f"engine.full_optimizer_states(). {TRAINERS}",
    )


def _refuse_load(optimizer: Optimizer, _: Any) -> None:
    raise PhaseError(
        "optimizer.load_state_dict() of an optimizer that an engine runs.",
        cause="resuming in the usual way: its state is sharded, in engine.state.",
        fix="load what fzero.checkpoint.save has saved with fzero.checkpoint.load; or write "
        "whole values with engine.set_full_optimizer_state(path, name, value).",
    )


def _is_elsewhere(seen: str) -> PhaseError:
    return PhaseError(
        f"optimizer.{seen} of an optimizer that an engine runs.",
        cause="a loop of before the engine, or a tool that looks into the optimizer: what it keeps "
        "is in engine.state, sharded over the ranks.",
        fix="engine.full_optimizer_state(path, name) gives a whole value, full_optimizer_states() "
        "all of them, set_full_optimizer_state(path, name, value) writes one, each on all ranks; "
        "optimizer.state.clear() begins anew. fzero.checkpoint.save(path, engine.state) saves.",
    )


def _refused(seen: str) -> Callable[..., Any]:
    def method(*_: Any) -> NoReturn:
        raise _is_elsewhere(seen)

    return method


class OptimizerStateOfEngine(MutableMapping[Any, Any]):
    """In the place of a torch.optim optimizer's `state`: `clear()` clears, all else raises.

    What the optimizer keeps is in the engine's state, sharded over the ranks. A read would be a
    collective, and what is written into the copies that it gives would be lost.
    """

    def __init__(self, clear: WeakMethod[Callable[[], None]]) -> None:
        self._clear = clear

    def clear(self) -> None:
        """Begin anew: every parameter is as before its first step. A collective."""
        clear = self._clear()
        if clear is None:
            raise _is_elsewhere("state.clear(), after its engine is gone,")
        clear()

    __getitem__ = _refused("state[p]")
    __setitem__ = _refused("state[p] = ...")
    __delitem__ = _refused("state, del [p],")
    __iter__ = _refused("state, a loop over it,")
    __len__ = _refused("state, its length,")
    __contains__ = _refused("state, whether p is in it,")
    __reduce__ = _refused("state, a copy of it,")

    def __repr__(self) -> str:
        return "<in engine.state, sharded>"


def optimizer_of(setup: Setup, at: Callable[[str], Tensor]) -> Optimizer | None:
    """Return the torch.optim optimizer of a state, if it has one.

    One that was made by a class or a factory gets its parameters back, by their paths: `at`.
    """
    chosen: Any = setup.optimizer
    if not isinstance(chosen, TorchOptimizer):
        return None
    if chosen.instance is not chosen.source:
        for group, paths in zip(chosen.instance.param_groups, chosen.members, strict=True):
            group["params"] = [at(path) for path in paths]
    return chosen.instance
