"""The points of a step, and the record of what a transform does at them.

loss -> local -> wire -> reduced -> update -> updated
each call, each call, each bucket, then once for each update
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.state.codec import Codec
from fzero.state.slots import Form

Needs = Literal["element", "leaf", "matrix"]
"""What a transform looks at to change an element: that element, or its whole leaf, of any shape; a
matrix is such a leaf."""

POINTS = ("loss", "local", "wire", "reduced", "update", "updated")
"""The points of a step, in their order."""

COMPARED = ("max_norm", "max_value")
"""The options of built-in transforms that ranks compare a line each, also where one has none."""

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Points:
    """What a transform does at the points of a step: pure functions, and the slots they keep.

    Attributes:
        name: of the transform; its slots are "<name>/<slot>" in a state.
        slots: {slot: form} as pairs. A slot of `init` that is not in it has the form of a leaf that
            learns, or of a number that is equal on every rank.
        init: (params, ctx) -> {slot: value}, the slots before the first update.
        loss: (slots, value, ctx) -> value.
        local: (slots, g, ctx) -> (slots, g).
        wire: the codec of gradients that cross ranks.
        reduced: (slots, grads, ctx) -> (slots, grads).
        update: (slots, grads, ctx, rule) -> (slots, params).
        updated: (slots, params, ctx) -> (slots, params).
        reads: "before": the parameters before the update are kept for `updated`.
        needs: "leaf", "matrix": `reduced` and `updated` get whole leaves, on their owners.
        excludes: the names of transforms and options that it cannot stand beside.
        checked: the first calls that were found right, by point and rank.
    """

    name: str
    slots: tuple[tuple[str, Form], ...] | None = None
    init: Function | None = None
    loss: Function | None = None
    local: Function | None = None
    wire: Codec | None = None
    reduced: Function | None = None
    update: Function | None = None
    updated: Function | None = None
    reads: tuple[str, ...] = ()
    needs: Needs = "element"
    excludes: tuple[str, ...] = ()
    checked: set[Any] = field(default_factory=set[Any], compare=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether it looks at whole leaves."""
        return self.needs != "element"

    @property
    def at(self) -> tuple[str, ...]:
        """The points at which it does something."""
        return tuple(point for point in POINTS if getattr(self, point) is not None)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.at)})"


At = Literal["pass", "call", "update"]
"""Where ranks compare facts: a pass begins, they make a call together, an update begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Something that a rank says of the gradients of a state where ranks agree: yes, or no.

    Attributes:
        of: state -> whether this rank says so.
        unlike: (a rank that says so, one that holds gradients and does not) -> the error that all
            ranks raise then; None: ranks may differ.
        heard: state -> state, where any rank says so.
        raises: (states, their treespec, those of which any rank says so) -> the error that all
            ranks raise before an update of them; None: no error.
    """

    of: Callable[[Any], bool]
    unlike: Callable[[int, int], Exception] | None = None
    heard: Callable[[Any], Any] | None = None
    raises: Callable[[Any, Any, Any], Exception | None] | None = None


When = Literal["options", "ranks", "rule", "call", "graph", "write"]
"""When it is known that two do not go together: see `Excludes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excludes:
    """Something that a transform cannot stand beside.

    Attributes:
        beside: what that is, as users write it.
        when: at which moment both are known: by the "options" of a state; with its stage and
            "ranks"; with its "rule"; in a "call" of a loss; under a "graph" of the whole step; at
            a "write" of parameters.
        seen: what is known then -> what an error says of it; "" where the two are not together.
        cause: why they do not go together.
        fix: what to do.
    """

    beside: str
    when: When
    seen: Callable[[Any], str]
    cause: str
    fix: str


class Mean(NamedTuple):
    """What an update makes of a sum of gradients, or of its norm, and what it makes so of which."""

    of: Callable[[Tensor], Tensor] = lambda x: x
    back: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """What a transform of fzero's own does: functions of whole states, and of what is under way.

    It is not by path, so that the multiplications of several are one, and kernels can do their
    part. `fzero/transforms/recipe.py` has all of them, and at which point each does what.

    Attributes:
        name: of the transform or option.
        options: of it, for ranks to compare.
        slots: {slot: form} as pairs: "<name>/<slot>" in a state.
        acts: state -> whether the state has it, by its setup and the names of its slots alone: it
            is asked once for those. Of what never acts nothing is called but `facts` and `called`.
        facts: (state, where) -> lines of text that ranks must have in common; where: see `At`. Of a
            state that has it not they are asked once as well.
        flag: what each rank says of its gradients where ranks agree.
        called: (state, `GivenCall`) -> state, or an error: a call brings it gradients.
        begins: state -> state, before a loss of it is made, and before an update.
        leaves: (state, {leaf: tensor}): a loss is about to be given these leaves that learn.
        loss: (state, loss) -> the loss that is differentiated, of a state that learns.
        factor: state -> what its losses, and so its gradients, are multiplied by: [], None for 1.
        forgets: state -> state: all ranks have thrown its gradients away.
        gathered: (states, pass) -> what is shown each group that a pass gathers, or None.
        calls: (states, reducer) -> what it does in their backwards: a `CallPart`, or None.
        decides: (running, means): an update begins: skip it, change slots.
        units: (running, ready) -> ready, in the units of the mean gradient.
        mean: state -> the `Mean` that an update makes of the gradients it holds. A collective.
        reduced: (self, running, ready) -> ready, in its place among those of users.
        ready: (running, ready) -> ready, before the rule.
        rule: (state, the flats that learn) -> options of the rule's `advance`.
        around: (running, state, and what the rule's `advance` takes) -> what that returns.
        updated: (running, new state) -> new state.
        excludes: what it cannot stand beside.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    slots: tuple[tuple[str, Form], ...] = ()
    excludes: tuple[Excludes, ...] = field(default=(), compare=False)
    acts: Function | None = field(default=None, compare=False)
    facts: Callable[[Any, At], list[str]] | None = field(default=None, compare=False)
    flag: Flag | None = field(default=None, compare=False)
    called: Function | None = field(default=None, compare=False)
    leaves: Function | None = field(default=None, compare=False)
    loss: Function | None = field(default=None, compare=False)
    factor: Function | None = field(default=None, compare=False)
    forgets: Function | None = field(default=None, compare=False)
    begins: Function | None = field(default=None, compare=False)
    gathered: Function | None = field(default=None, compare=False)
    calls: Function | None = field(default=None, compare=False)
    decides: Function | None = field(default=None, compare=False)
    units: Function | None = field(default=None, compare=False)
    mean: Callable[[Any], Mean] | None = field(default=None, compare=False)
    reduced: Function | None = field(default=None, compare=False)
    ready: Function | None = field(default=None, compare=False)
    rule: Function | None = field(default=None, compare=False)
    around: Function | None = field(default=None, compare=False)
    updated: Function | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.name}({shown})"


# `option`: a field of a record that users set, with all that is known of it.
#
# In: a default, and the facts of an option. Out: a field of a frozen dataclass. The table of
# options, signatures, docstrings, docs/support.md and the DeepSpeed reader are made from such
# fields: see `fzero.options`. A field without `option` is what a record works out for itself.


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
"""The default of an option that has none."""

ZERO = "zero_optimization."
"""The section of DeepSpeed's config that most keys are in."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueCheck:
    """Which values an option accepts: a predicate, its description, the usual cause of others."""

    good: Callable[[Any], bool]
    wanted: str
    cause: str = "a value of another kind or out of range."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """What is known of one option, but for its name, type and default: those are its field's.

    Attributes:
        check: of its value alone; None: whoever uses it first checks it.
        stages: those at which it changes anything.
        instead: {driver: what to do there}, of the drivers that do not take it, with the reason.
        deepspeed: the key of DeepSpeed's config that sets it; "" for none.
        axis: the axis of `fzero.certify` that tries its values; "" where cells have the default.
    """

    name: str = ""
    default: Any = REQUIRED
    type: Any = None
    help: str
    check: ValueCheck | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    instead: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    deepspeed: str = ""
    axis: str = ""

    @property
    def only(self) -> str:
        """The prefix of its help that names its stages, as "stages 1 to 3: "; "" for all four."""
        if len(self.stages) == 4:
            return ""
        first, last = self.stages[0], self.stages[-1]
        return f"stage {last} only: " if first == last else f"stages {first} to {last}: "

    def require(self, value: Any, of: str = "") -> None:
        """Raise `LayoutError`, naming the option, for a value that it may not have."""
        check = self.check
        if check is not None:
            require(of + self.name, value, check.good, check.wanted, cause=check.cause)


def option(default: Any, help: str, **facts: Any) -> Any:
    """Return a field of a frozen dataclass that users set, by its name, as a keyword.

    Args:
        default: its value where nothing is given; `REQUIRED` for an option that must be given.
        help: what it does: whole sentences, which docstrings show.
        **facts: the other attributes of `Option`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Coffee:
        ...     cups: int = option(1, "how many.", check=ValueCheck(is_count, "a number"))
        ...     hot: bool = True  # not an option
        >>> [(one.name, one.type, one.default, one.help) for one in options_in(Coffee)]
        [('cups', <class 'int'>, 1, 'how many.')]
        >>> Coffee().cups
        1
    """
    entry = {"option": Option(help=help, **facts)}
    if default is REQUIRED:
        return dataclasses.field(metadata=entry)
    return dataclasses.field(default=default, metadata=entry)


def options_in(record: type) -> Iterator[Option]:
    """Yield the options among the fields of a record, and of records in its fields, in order."""
    types = get_type_hints(record)
    for option_field in dataclasses.fields(record):
        entry, kind = option_field.metadata.get("option"), types[option_field.name]
        if entry is not None:
            default = (
                REQUIRED if option_field.default is dataclasses.MISSING else option_field.default
            )
            yield dataclasses.replace(entry, name=option_field.name, type=kind, default=default)
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from options_in(kind)


def one_of(*values: Any, wanted: str = "") -> ValueCheck:
    """Return a check that accepts these values only, compared with their type: 1 is not True."""
    good: set[tuple[type, Any]] = {(type(value), value) for value in values}

    def is_one(x: Any) -> bool:
        return isinstance(x, bool | str | torch.dtype | None) and (type(x), x) in good

    return ValueCheck(is_one, wanted or " or ".join(map(repr, values)))


def of_path(name: str) -> ValueCheck:
    """Return the check for a function of a path, or None."""
    wanted = f"a function of a leaf's path: {name}=lambda path: ..."
    return ValueCheck(lambda x: x is None or callable(x), wanted, "a list of paths, or a prefix.")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLAG = ValueCheck(
    lambda x: isinstance(x, bool), "True or False", "a word from a config file or a command line."
)
DTYPE = one_of(None, *_DTYPES, wanted=f"None or one of {_DTYPES}")
NUMEL = ValueCheck(lambda x: is_count(x, 0), "a number of elements: an int of 0 or more")
