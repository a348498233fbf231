"""A naive model of the hook machine: it keeps the whole history and decides by reading it.

No counter lives from one event to the next. Each answer is found again, from the first event on,
in the words of the law: which enters are open, where the latest user backward began, which hooks
fired in it, which epilogues it has had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue

RUN, DROP = RunEpilogue(), DropBackward()


@dataclass(frozen=True)
class Event:
    """Something that happened. `entered`: this one opened a backward that was not open."""

    name: str
    expected: int = 0
    task: int | None = None
    inside: bool = False
    entered: bool = False
    effects: HookEffects = ()

    @property
    def ended_graph(self) -> bool:
        return self.name == "complete" and RUN in self.effects


@dataclass
class NaiveHooks:
    """`happened(event)` is what a HookState's transition must answer."""

    history: list[Event] = field(default_factory=list)

    def happened(self, name: str, *, expected: int = 0, task: int | None = None) -> HookEffects:
        event = Event(name, expected, task, inside=self.depth > 0)
        effects = self._answer(event)
        entered = not event.inside and (
            name == "enter" or (name == "reenter" and self._may_reenter())
        )
        self.history.append(Event(name, expected, task, event.inside, entered, effects))
        return effects

    # What the record shows, each found in the history.

    @property
    def depth(self) -> int:
        depth = 0
        for event in self.history:
            if event.name == "reset" or event.ended_graph:
                depth = 0
            elif event.name == "enter" or event.entered:
                depth += 1
            elif event.name == "exit" and depth:
                depth -= 1
        return depth

    @property
    def step(self) -> list[Event]:
        """What happened since the last reset."""
        resets = [i for i, event in enumerate(self.history) if event.name == "reset"]
        return self.history[resets[-1] + 1 :] if resets else self.history

    @property
    def backward(self) -> list[Event]:
        """What happened in this step since the latest outermost user backward began."""
        return _since(self.step, [e.name == "enter" and e.entered for e in self.step])

    @property
    def phase(self) -> list[Event]:
        """What happened in this backward since it was entered or re-entered from depth 0."""
        return _since(self.backward, [e.entered for e in self.backward])

    @property
    def hooks(self) -> list[Event]:
        return [e for e in self.backward if e.name == "hook" and e.inside]

    @property
    def most(self) -> int:
        return max((hook.expected for hook in self.hooks), default=0)

    @property
    def remaining(self) -> int:
        return 0 if self.graph_ended else max(self.most - len(self.hooks), 0)

    @property
    def graph_ended(self) -> bool:
        return any(event.ended_graph for event in self.backward)

    @property
    def seen(self) -> bool:
        return any(event.name == "enter" for event in self.step)

    @property
    def epilogue_ran(self) -> bool:
        return any(RUN in event.effects for event in self.phase)

    @property
    def late(self) -> bool:
        """A hook came after the epilogue of its phase."""
        ran = [RUN in event.effects for event in self.phase]
        return True in ran and any(
            e.name == "hook" and e.inside for e in self.phase[ran.index(True) + 1 :]
        )

    @property
    def unfinished(self) -> bool:
        """Gradients wait for an epilogue."""
        begun = len(self.hooks) > 0 or self.waiting is not None
        return begun and not self.graph_ended and (self.late or not self.epilogue_ran)

    @property
    def waiting(self) -> int | None:
        """The graph task whose callback was asked for and has not come."""
        asked = [e for event in self.backward for e in event.effects]
        tasks = [e.graph_task_id for e in asked if isinstance(e, QueueCallback)]
        return None if self.graph_ended or not tasks else tasks[-1]

    @property
    def outside(self) -> int:
        """Hooks outside a backward since a backward was last entered."""
        hooks = [e.name == "hook" and not e.inside for e in self.step]
        since = max((i for i, e in enumerate(self.step) if e.entered), default=-1)
        return sum(hooks[since + 1 :])

    @property
    def should_refresh(self) -> bool:
        """Whether the next hook is the first: of a backward, of a row outside one, of a phase."""
        exited = self.seen and self.depth == 0 and self.remaining == 0
        return self.outside == 0 and (not self.hooks or exited)

    # The decisions.

    def _answer(self, event: Event) -> HookEffects:
        if event.name == "reset" or (event.name == "enter" and not event.inside):
            return self._drop()
        if event.name == "complete":
            due = self.waiting is not None and event.task in (None, self.waiting)
            return (RUN,) if due else ()
        if event.name == "queue":
            return self._queue(event)
        return self._hook(event) if event.name == "hook" else ()

    def _drop(self) -> HookEffects:
        left = self.waiting is not None or len(self.hooks) > 0
        return (DROP,) if left and not self.epilogue_ran else ()

    def _queue(self, event: Event) -> HookEffects:
        task, wanted = event.task, self.waiting is None and not self.epilogue_ran
        if task is None or task < 0 or not (event.inside and wanted):
            return ()
        return (QueueCallback(task),)

    def _hook(self, event: Event) -> HookEffects:
        if not event.inside or self.waiting is not None or self.epilogue_ran:
            return ()
        hooks = [*self.hooks, event]
        all_here = len(hooks) >= max(hook.expected for hook in hooks)
        return self._queue(event) or ((RUN,) if all_here else ())

    def _may_reenter(self) -> bool:
        return self.seen and not self.graph_ended and self.remaining == 0


def _since(events: list[Event], marks: list[bool]) -> list[Event]:
    starts = [i for i, mark in enumerate(marks) if mark]
    return events[starts[-1] :] if starts else []
