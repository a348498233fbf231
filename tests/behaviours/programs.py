"""Programs: random interleavings of what a training loop can do, run by fzero and by the model.

A program is data, a list of steps; a step is a list of ops that runs inside one `fzero.shard`:

    ("grad", loss)          one gradient, added to the others
    ("update",)             apply_gradients; refused if there is no gradient
    ("read",)               what fzero.gradients says now
    ("params",)             what fzero.full_params says now
    ("window", ops)         the ops under fzero.coalesce; refused inside a window
    ("accumulate", k, ops)  the ops on k parts of the batch, updates wait for the last
    ("clip", ops)           the ops under a bound that does not bind
    ("raise",)              an error in the step
    ("raise in loss", loss) an error in the loss, after it used its parameters

A step that raises leaves the state as it was; a refusal (PhaseError) is caught in the step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import fzero
from fzero.errors import PeerFailedError
from fzero.state import OptimizerOver
from tests.behaviours.models import (
    Naive,
    Tree,
    Uses,
    batches_for,
    loss_of,
    optimizer,
)
from tests.strategies import on_rank, same

Op = tuple[Any, ...]
Program = tuple[tuple[Op, ...], ...]
Seen = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The world that a program runs in; no choice here may change a number."""

    ranks: int
    stage: int
    reshard: Any = True
    bucket_bytes: int = 2**20
    donate: bool = False
    ordered: bool = False
    replicas: int = 1  # of a mesh of two dims, where they divide the ranks
    over: OptimizerOver = "shard"

    def __str__(self) -> str:
        kept = f" reshard={self.reshard}" if self.stage == 3 else ""
        mesh = f" mesh={self.mesh} over {self.over}" if self.replicas > 1 else ""
        donating = " donating" if self.donate else ""
        return f"{self.ranks} ranks stage {self.stage}{kept}{donating}{mesh}"

    @property
    def mesh(self) -> tuple[int, int]:
        """(replicas, shards)"""
        replicas = math.gcd(self.replicas, self.ranks)
        return replicas, self.ranks // replicas

    def shard(self, fn: Callable[..., Any]) -> Any:
        """`fzero.shard` with these options."""
        return fzero.shard(
            fn,
            stage=self.stage,
            reshard_after_forward=self.reshard,
            bucket_bytes=self.bucket_bytes,
            donate=self.donate,
            ordered=self.ordered,
            mesh=self.mesh,
            optimizer_over=self.over,
        )


@dataclass(frozen=True)
class Case:
    """A program with the parameters and losses that it is about."""

    tree: Tree
    uses: Uses
    program: Program


class Boom(Exception):
    """The error that a program raises."""


def play(setting: Setting, case: Case, *, rank: int | None = None) -> list[list[Seen]]:
    """Run the program; return, after each step, what each rank sees.

    rank: this process's one; None for virtual ranks, then the outer step is under `simulate`.
    """
    with warnings.catch_warnings():  # some losses use no parameter
        warnings.filterwarnings("ignore", "the loss requires no grad", UserWarning)
        return _play(setting, case, rank)


def _play(setting: Setting, case: Case, rank: int | None) -> list[list[Seen]]:
    def over(fn: Callable[..., Any]) -> Any:
        return fzero.simulate(fn, world_size=setting.ranks) if rank is None else fn

    state = over(setting.shard(_unused_step)).init(case.tree, optimizer())
    found = []
    for number, ops in enumerate(case.program):
        batches = batches_for(case.tree, number)[: setting.ranks]
        inside: dict[int, list[Any]] = {r: [] for r in range(setting.ranks)}
        step = over(setting.shard(_step_of(case, ops, inside)))
        before, raised = state, False
        try:
            state, _ = step(state, batches if rank is None else batches[rank])
        except (Boom, PeerFailedError):  # where ranks gather by themselves, one ends the others
            raised = True
        now = _observe_if_alive(over, state)
        if now == "used up":  # by the step that raised; `check` decides whether it may have been
            found.append([])
            break
        earlier = None if state is before else _observe_if_alive(over, before)
        assert setting.donate or earlier != "used up"
        rows = [now] if rank is not None else [on_rank(now, r) for r in range(setting.ranks)]
        for r, row in enumerate(rows):
            row |= {"raised": raised, "inside": inside[r if rank is None else rank]}
            row |= {"backwards": state.progress.backwards, "reductions": state.progress.reductions}
            if earlier is not None:
                row["earlier"] = earlier if rank is not None else on_rank(earlier, r)
        found.append(rows)
    return found


def expected(setting: Setting, case: Case) -> list[Seen]:
    """What every rank must see after each step, by the model."""
    naive, found = Naive(case.tree, case.uses, setting.ranks), []
    for number, ops in enumerate(case.program):
        batches = batches_for(case.tree, number)[: setting.ranks]
        before, new, inside, raised = naive.step, naive.copy(), [], False
        try:
            _run_on_model(new, ops, batches, inside)
            naive = new
        except Boom:
            raised = True
        found.append(
            {
                "params": naive.params,
                "gradients": naive.summed() if naive.gradients else None,
                "step": naive.step,
                "backwards": len(naive.gradients),
                "reductions": naive.reductions,
                "inside": inside,
                "raised": raised,
                "updated": new.step > before,
            }
        )
    return found


def check(got: list[list[Seen]], want: list[Seen]) -> None:
    """Compare bit for bit; a state from before must be as it was, or refuse to be read."""
    previous: Seen | None = None
    for number, (rows, right) in enumerate(zip(got, want, strict=False)):
        assert rows or (right["raised"] and right["updated"]), f"step {number} used the state up"
        for r, row in enumerate(rows):
            where = f"step {number}, row {r}"
            for key in ("raised", "backwards", "reductions", "step"):
                assert row[key] == right[key], f"{where}: {key} {row[key]}, want {right[key]}"
            for key in ("params", "gradients"):
                _assert_same(row[key], right[key], f"{where}: {key}")
            if not right["raised"]:  # else some ranks were stopped before their own error
                assert len(row["inside"]) == len(right["inside"]), where
                for a, b in zip(row["inside"], right["inside"], strict=True):
                    _assert_same(a, b, f"{where}: read inside")
            if previous is not None and row.get("earlier") not in (None, "used up"):
                for key in ("params", "gradients"):
                    _assert_same(row["earlier"][key], previous[key], f"{where}: earlier {key}")
        previous = right


def _step_of(case: Case, ops: tuple[Op, ...], inside: dict[int, list[Any]]) -> Callable[..., Any]:
    def step(state: Any, batch: Tensor) -> tuple[Any, None]:
        seen = inside[fzero.axis_index()]
        for op in ops:
            state = _run_op(case, op, state, batch, seen)
        return state, None

    return step


def _run_op(case: Case, op: Op, state: Any, batch: Tensor, seen: list[Any]) -> Any:
    def nested(ops: tuple[Op, ...]) -> Callable[..., Any]:
        return _step_of(case, ops, {fzero.axis_index(): seen})

    kind, rest = op[0], op[1:]
    if kind == "raise":
        raise Boom
    if kind == "params":
        seen.append(fzero.full_params(state))
        return state
    if kind == "grad":
        return fzero.grad_and_reduce(loss_of(case.uses, rest[0]), state)(batch)[0]
    if kind == "raise in loss":
        return fzero.grad_and_reduce(_failing(case, rest[0]), state)(batch)[0]
    if kind == "accumulate":
        return fzero.accumulate(nested(rest[1]), steps=rest[0])(state, batch)[0]
    if kind == "clip":
        return fzero.clip(nested(rest[0]), max_norm=1e30)(state, batch)[0]
    try:
        if kind == "window":
            if state.window.is_open:
                return fzero.coalesce(nested(()))(state, batch)[0]
            return fzero.coalesce(nested(rest[0]))(state, batch)[0]
        if kind == "read":
            seen.append(fzero.gradients(state))
            return state
        assert kind == "update", op
        return fzero.apply_gradients(state)
    except fzero.PhaseError as refusal:
        assert not isinstance(refusal, fzero.DonatedError), refusal
        seen.append("refused")
        return state


def _failing(case: Case, number: int) -> Callable[..., Any]:
    loss = loss_of(case.uses, number)

    def fails(params: Any, batch: Tensor) -> Tensor:
        loss(params, batch)
        raise Boom

    return fails


def _run_on_model(
    naive: Naive,
    ops: tuple[Op, ...],
    batch: Tensor,
    inside: list[Any],
    *,
    window: bool = False,
    scale: float = 1.0,
    last: bool = True,
) -> None:
    """The same ops on the model. `scale` and `last`: of the parts of the batch that this is one."""
    for op in ops:
        kind, rest = op[0], op[1:]
        if kind in ("raise", "raise in loss"):
            raise Boom
        if kind == "params":
            inside.append(naive.params)
        elif kind == "grad":
            naive.grad(rest[0], batch, scale=scale, window=window)
        elif kind == "clip":
            _run_on_model(naive, rest[0], batch, inside, window=window, scale=scale, last=last)
        elif kind == "accumulate":
            for i, part in enumerate(batch.chunk(rest[0], dim=1)):
                share, is_last = scale / rest[0], last and i == rest[0] - 1
                _run_on_model(
                    naive, rest[1], part, inside, window=window, scale=share, last=is_last
                )
        elif kind == "window" and not window:
            _run_on_model(naive, rest[0], batch, inside, window=True, scale=scale, last=last)
            naive.end_window()
        elif kind == "window" or (kind == "read" and not naive.gradients):
            inside.append("refused")
        elif kind == "read":
            inside.append(naive.summed())
        elif last and naive.gradients:
            naive.update()
        elif last:
            inside.append("refused")


def _unused_step(state: Any, batch: Any) -> tuple[Any, None]:
    return state, None


def _observe_if_alive(over: Callable[..., Any], state: Any) -> Any:
    def look(state: Any) -> Seen:
        has = state.progress.backwards > 0
        return {
            "params": fzero.full_params(state),
            "gradients": fzero.gradients(state) if has else None,
            "step": state.step,
        }

    try:
        return over(look)(state)
    except fzero.DonatedError:
        return "used up"


def _assert_same(got: Any, want: Any, where: str) -> None:
    try:
        same(got, want)
    except AssertionError as error:
        error.add_note(where)
        raise
