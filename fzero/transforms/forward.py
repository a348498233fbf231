"""A forward of some states by ordinary autograd, and its backward: at once, or later.

    grad_and_reduce   forward -> backward -> finish
    vjp               forward -> end .. pull: resume -> backward -> finish

Gathers and reductions run beside them. Between a forward that has ended and its backward no values
of parameters are kept: the graph has placeholders at stage 3, which are read from the pass that the
backward brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.collectives import connecting, connecting_calls, performer_of, shared, tied_to
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.machine.partition import assemble
from fzero.ranks.mesh import MetInLoss
from fzero.state import TrainState
from fzero.state.train_state import Weight, weighed, with_weight
from fzero.transforms.autograd import WROTE, explains_writes, versions_of
from fzero.transforms.backward_pass import Pass, PassForm, leaves_in_pass, passes_of
from fzero.transforms.closure import backward_of
from fzero.transforms.recipe import factors_of, loss_learned, recipe_of

T = TypeVar("T")


class Forward:
    """What a function of parameters has left in autograd's graph, and the passes it runs in.

    Attributes:
        leaves: of each state those that it is differentiated by, by their index.
        passes: one for each set of ranks; none between a forward that has ended and its backward.
        places: the pass of each state, and its place in it.
        tokens: of the collectives that the function has called.
    """

    def __init__(self, states: Sequence[TrainState], form: PassForm) -> None:
        if len(states) > 1:
            _require_one_gathers(states)
        self.leaves = list[dict[int, Tensor]]()
        self._begin(states, form, ())

    def _begin(self, states: Sequence[TrainState], form: PassForm, before: Sequence[Pass]) -> None:
        self.passes, self.places = passes_of(states, form, before)
        self._states, self._in_forward = states, not before
        self._handles = list[Any]()  # of hooks of leaves
        self._flats = [x for one in states for x in one.window.gathered or one.params.flats]
        self._versions = versions_of(self._flats)

    @property
    def _was_written(self) -> bool:
        return versions_of(self._flats) != self._versions

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """End the passes with this block; where it raises, in step with the other ranks."""
        try:
            yield
        except MetInLoss as met:
            self._end_forward_of(met)
            raise
        except BaseException as error:
            for one in self.passes:
                one.fail(error)
            if isinstance(error, RuntimeError) and self._was_written:
                raise PhaseError(WROTE) from error
            raise
        finally:
            for one in self.passes:
                one.close()

    def _end_forward_of(self, met: MetInLoss) -> None:
        """End a forward in which the loss has met a collective, together with all ranks.

        Raises the error of the collective in a backward, of which gradients may be reduced already.
        """
        try:
            if not self._in_forward:
                raise met.error
            for one in self.passes:
                one.end_forward()
                one.finish_forward()
        except BaseException as error:
            for one in self.passes:
                one.fail(error)
            raise

    def forward(self, fn: Callable[[list[Any]], T]) -> T:
        """Return fn([params of each state]), recorded by autograd."""
        for one in self.passes:
            one.begin_forward()
        params = list[Any]()
        before = connecting_calls()
        with torch.enable_grad():
            for number, position in self.places:
                one, by_leaf = self.passes[number], leaves_in_pass(self.passes[number], position)
                state = one.states[position]
                learn = [i for i, x in enumerate(state.setup.layout.leaves) if x.trainable]
                self.leaves.append({i: by_leaf[i].requires_grad_() for i in learn})
                for looks in recipe_of(state).leaves:
                    looks(state, self.leaves[-1])
                params.append(assemble(state.setup.layout, by_leaf))
            with explains_writes(params), connecting() as calls:
                result = fn(params)
        self.tokens, self._connected = calls.tokens, connecting_calls() > before
        return result

    def end(self) -> None:
        """End a forward whose backward comes later: what stays holds no state, no parameters."""
        if self._was_written:
            raise PhaseError(WROTE)
        for one in self.passes:
            one.end_forward()
            one.finish_forward()
        self.rest()

    def rest(self) -> None:
        """Let go of the states, of all values, and of the leaves' hooks into the passes."""
        for handle in self._handles:
            handle.remove()
        for one in self.passes:
            one.rest()
        self._states, self._flats = (), []

    def resume(self, states: Sequence[TrainState], form: PassForm) -> None:
        """Go on with these states, whose parameters are those of the forward."""
        self._begin(states, form, self.passes)

    def backward(self, loss: Tensor, weight: Weight | None, *, retain: bool = False) -> str | None:
        """Run the backward of a loss that the forward has made, and reduce its gradients beside it.

        retain: the graph stays, for another one. Returns what to warn of, if no leaf of the states
        has got a gradient.
        """
        states, passes = self._states, self.passes
        before = connecting_calls()
        with torch.enable_grad(), connecting() as calls:
            learned = loss_learned(states, loss)
        tokens = {**self.tokens, **calls.tokens}
        connected = self._connected or connecting_calls() > before
        how = None if weight is None else weighed(loss, weight, connected=connected)
        for one in passes:
            for part in one.parts.values():
                part.loss(loss, weight)
            if self._in_forward:
                one.end_forward()
        self._in_forward, ties = False, list[Tensor]()
        if tokens:
            with torch.enable_grad():  # other ranks may wait for what is left of the forward's plan
                ties = shared([learned], tokens).ties
                learned = tied_to(learned, ties) if ties else learned
        for one in passes:
            one.begin_backward(weighed=how)
        by, rest = factors_of(states)
        by = by if how is None else with_weight(by, how)
        for leaves, (number, position), factor in zip(self.leaves, self.places, rest, strict=True):
            for index, leaf in leaves.items():
                leaf.grad = None  # what a backward inside of the loss has left
                if factor is not None:
                    self._handles.append(leaf.register_hook(partial(_times, factor)))
                on_gradient = partial(passes[number].on_gradient, position, index)
                self._handles.append(leaf.register_post_accumulate_grad_hook(on_gradient))
        if self._was_written:
            raise PhaseError(WROTE)
        learning = any(self.leaves)
        return _backward(learned, by, passes, learning=learning and not ties, retain=retain)

    def finish(self) -> list[TrainState]:
        """Return the states with the gradients of the backward."""
        new = [one.finish() for one in self.passes]
        return [new[number][position] for number, position in self.places]


def _times(factor: Tensor, gradient: Tensor) -> Tensor:
    return gradient * factor.to(gradient.dtype)


def _backward(
    loss: Tensor, by: Tensor | None, passes: Sequence[Pass], *, learning: bool, retain: bool
) -> str | None:
    """Run the backward of a loss, times `by`; return a warning, or raise, if nothing learns by it.

    learning: whether the states have leaves to differentiate by.
    """
    if loss.requires_grad:
        with backward_of(loss):
            torch.autograd.backward(loss, None if by is None else by.to(loss), retain)
        if learning and not any(one.reducer.received for one in passes):
            return _BY_NOTHING
        return None
    if learning:
        return _DETACHED
    # A leaf outside of the states would have made the loss require grad.
    raise learns_nothing("grad_and_reduce")


def _require_one_gathers(states: Sequence[TrainState]) -> None:
    gathering = [one.setup.axis for one in states if one.setup.gathers_by_unit]
    if len(set(gathering)) < 2:
        return
    by_ranks = {performer_of(axis): axis for axis in reversed(gathering)}
    if len(by_ranks) > 1:
        last, first, *_ = by_ranks.values()
        raise AxisError(
            f"states of stage 3 on {first} and on {last} under one loss.",
            cause="models that are sharded over other groups of ranks.",
            fix="make all but one of them at stages 0 to 2, or on the same mesh.",
        )


_BY_NOTHING = explain(
    "the loss requires grad, and by no parameter of the state: its gradient is zero.",
    cause="a loss that calls the module itself, model(x), in the place of apply(params, x).",
    fix="use the `params` that the loss is given.",
)

_DETACHED = explain(
    "the loss requires no grad: its gradient is zero for every parameter.",
    cause="a loss that was detached, computed under no_grad, or made of numbers only.",
    fix="return the loss as the `params` that it is given made it; loss.detach() belongs outside.",
)


def learns_nothing(name: str) -> LayoutError:
    """Return the error of a call about gradients of states all of whose leaves are frozen."""
    return LayoutError(
        f"{name}: no leaf of the state learns, so it has no gradients.",
        cause="a state that was made with fzero.optim.no_optimizer() is only read; or every leaf "
        "is frozen (trainable=, requires_grad=False, wrt=).",
        fix="to read it use fzero.evaluate(fn, state)(x), or one loss of a pytree of states, of "
        "which others learn. For gradients of a model that is never updated (SAM, "
        "meta-gradients) make it with fzero.optim.sgd(0.0), which keeps no moments.",
    )
