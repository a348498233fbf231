"""Law 6 on a small autograd engine: programs that users write, and what must come of them.

One epilogue for each outermost user backward, after its last hook, at the end of the outermost
graph task; none for a backward that raised, none for one inside a forward; depth 0 after each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.state import hooks
from fzero.state.effects import HookEffects, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState


class Interrupted(Exception):
    """What a user's code raised in the middle of a backward."""


Item = Any  # int: a parameter of that engine gets its gradient; "raise"; or a tuple, see Autograd


@dataclass
class Autograd:
    """Runs backwards over two engines as torch does: graph tasks, and callbacks when they end.

    A tuple among the items of a graph task is a graph task inside it: a phase of reentrant
    checkpointing or, with "user" in front, a backward of the user's own. The driver does what an
    adapter does: it enters on outputs, counts when told to, runs what it is asked to run.
    """

    callbacks: bool
    states: list[HookState] = field(default_factory=lambda: [HookState(), HookState()])
    running: list[int] = field(default_factory=list)
    queued: dict[int, list[int]] = field(default_factory=dict)
    said: list[tuple[int, str]] = field(default_factory=list)

    @property
    def task(self) -> int | None:
        return self.running[-1] if self.callbacks and self.running else None

    def happens(self, at: int, answer: tuple[HookState, HookEffects]) -> None:
        self.states[at], effects = answer
        for effect in effects:
            if isinstance(effect, QueueCallback):
                assert effect.graph_task_id == self.task == self.running[0], "a nested graph task"
                self.queued[effect.graph_task_id].append(at)
                continue
            self.said.append((at, type(effect).__name__))
            while effect == RunEpilogue() and self.states[at].backward_active_depth:
                self.states[at], _ = hooks.exit_backward(self.states[at])

    def hook(self, at: int, hooks_in_all: int) -> None:
        expected = self.states[at].max_expected_hooks_seen
        if hooks.should_refresh_expected_hook_count(self.states[at]):
            expected = hooks_in_all
            self.said.append((at, "count"))
        self.happens(at, hooks.reenter_backward_if_needed(self.states[at]))
        self.said.append((at, "hook"))
        answer = hooks.update_hook_state_and_maybe_run_epilogue(
            self.states[at], expected=expected, graph_task_id=self.task
        )
        self.happens(at, answer)

    def graph(self, items: tuple[Item, ...], totals: list[int], outputs: int) -> None:
        """Run one graph task, in which each engine finds `outputs` outputs of its own."""
        self.running.append(len(self.queued))
        self.queued[self.running[-1]] = []
        try:
            for at in engines_in(items) * outputs:
                self.happens(at, hooks.enter_backward(self.states[at]))
                asked = hooks.queue_post_backward_callback(self.states[at], graph_task_id=self.task)
                self.happens(at, asked)
            for item in items:
                self.item(item, totals)
            for at in self.queued[self.running[-1]]:
                self.happens(at, hooks.graph_completed(self.states[at], graph_task_id=self.task))
        finally:
            self.running.pop()

    def item(self, item: Item, totals: list[int]) -> None:
        if item == "raise":
            raise Interrupted
        if isinstance(item, int):
            self.hook(item, totals[item])
        elif item[:1] != ("user",):
            self.graph(item, totals, outputs=0)
        else:
            self.graph(item[1:], totals, outputs=1)
            for at in engines_in(item):
                self.happens(at, hooks.exit_backward(self.states[at]))


def flat(items: tuple[Item, ...]) -> list[Item]:
    return [x for item in items for x in (flat(item) if isinstance(item, tuple) else [item])]


def engines_in(items: tuple[Item, ...]) -> list[int]:
    return sorted({item for item in flat(items) if isinstance(item, int)})


HOOK = st.integers(0, 1)
ITEM = st.recursive(
    st.one_of(HOOK, HOOK, HOOK, HOOK, st.just("raise")),
    lambda item: st.one_of(
        st.lists(item, max_size=3).map(tuple),
        st.lists(item, max_size=3).map(lambda items: ("user", *items)),
    ),
    max_leaves=8,
)
BACKWARD = st.tuples(st.lists(ITEM, max_size=4).map(tuple), st.integers(1, 2))
FORWARD = st.lists(HOOK, max_size=2)  # hooks of backwards that run inside this forward
STEP = st.tuples(st.lists(FORWARD, max_size=2), BACKWARD)


@settings(max_examples=40 * settings().max_examples)
@given(callbacks=st.booleans(), steps=st.lists(STEP, max_size=3))
def test_law_6_one_epilogue_for_each_outermost_user_backward(
    callbacks: bool, steps: list[tuple[list[list[int]], tuple[tuple[Item, ...], int]]]
) -> None:
    autograd = Autograd(callbacks)
    for forwards, (items, outputs) in steps:
        for inside in forwards:
            forward(autograd, inside)
        backward(autograd, items, outputs)


def forward(autograd: Autograd, inside: list[int]) -> None:
    for at in (0, 1):
        autograd.happens(at, hooks.reset_for_new_step(autograd.states[at]))
    autograd.said.clear()
    for at in inside:
        autograd.hook(at, 1)
    assert [said for said in autograd.said if said[1] != "count"] == [(i, "hook") for i in inside]
    for state in autograd.states:
        assert replace(state, hooks_outside_backward=0) == HookState()


def backward(autograd: Autograd, items: tuple[Item, ...], outputs: int) -> None:
    totals = [flat(items).count(at) for at in (0, 1)]
    autograd.said.clear()
    try:
        autograd.graph(items, totals, outputs)
    except Interrupted:
        for at in (0, 1):
            autograd.happens(at, hooks.reset_for_new_step(autograd.states[at]))
    for at in engines_in(items):
        said = [what for who, what in autograd.said if who == at]
        fired = said.count("hook")
        whole = "raise" not in flat(items) or (fired == totals[at] and not autograd.callbacks)
        nothing = fired == 0 and not autograd.callbacks
        end = ["RunEpilogue"] if whole else [] if nothing else ["DropBackward"]
        assert said == ["count"] * min(fired, 1) + ["hook"] * fired + end
    assert [state.backward_active_depth for state in autograd.states] == [0, 0]
