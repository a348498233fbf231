"""What a state keeps, as a list of entries: the same for parameters, a rule's record and slots.

Whoever keeps something gives it as entries, and takes other values for them. Who saves, moves or
copies a state goes over the entries by their forms, and knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.state.buffers import Buffers, Placement
from fzero.state.setup import Setup
from fzero.state.slots import Form, Slot

Values = Mapping[Any, Tensor]
"""{group: its flat}; of a number {"": the tensor}; of named tensors {name: the tensor}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value that a state keeps, as this rank has it.

    Attributes:
        name: of it in a checkpoint: "params", "optimizer/exp_avg", "ema/mean".
        form: with the placement that the values have.
        values: see `Values`.
        owned: of placement OWNER: the names of which this rank is the owner.
        codecs: {group: the `Blocks` that its flat is encoded by}, of those that are: they are cut,
            and cross ranks, as bytes.
    """

    name: str
    form: Form
    values: Values
    owned: frozenset[str] = frozenset()
    codecs: Mapping[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others: a rule has flats and tensors of owners under one name."""
        return self.name, self.form.leaves

    @property
    def per_leaf(self) -> bool:
        """Whether it has flats, parallel to those of the parameters."""
        return self.form.leaves in ("learning", "all")

    @property
    def placement(self) -> Placement:
        """What the ranks' values are to each other."""
        assert self.form.placement is not None
        return self.form.placement


def entry_of(setup: Setup, name: str, slot: Slot) -> Entry:
    """Return a slot as an entry.

    Raises `LayoutError` for a value that is not what its form says.

    Example:
        >>> import torch, fzero
        >>> setup = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=0).setup
        >>> slot = Slot(value=torch.zeros(()), form=Form(leaves="number"))
        >>> entry_of(setup, "norm/mean", slot).values
        {'': tensor(0.)}
    """
    value, form = slot.value, slot.form
    values: dict[Any, Any]
    if form.leaves == "number":
        good, values = isinstance(value, Tensor), {"": value}
    elif form.leaves == "named":
        good = _has_tensors(value)
        values = dict(value) if good else {}
    else:
        groups = _groups(setup, form)
        good = isinstance(value, Buffers) and len(value.flats) in (0, len(groups))
        values = dict(zip(groups, value.flats, strict=False)) if good else {}
    if not good:
        raise LayoutError(
            f"the slot {name} has a {type(value).__name__}, its form is {form}.",
            cause="a slot that was made by hand.",
            fix='give fzero.state.Buffers with a flat of each group for leaves="learning" or "all",'
            ' a tensor for "number", a dict of tensors for "named".',
        )
    placed = form.placed(setup.optimizer_state)
    if isinstance(value, Buffers) and value.flats:
        placed = value.placement
    owned = frozenset(str(k) for k, x in values.items() if x.numel())
    return Entry(name=name, form=replace(form, placement=placed), values=values, owned=owned)


def _has_tensors(value: Any) -> bool:
    """Whether it is a mapping with tensors as values."""
    if not isinstance(value, Mapping):
        return False
    values: list[Any] = [*value.values()]
    return all(isinstance(x, Tensor) for x in values)


def slot_with(setup: Setup, slot: Slot, values: Values) -> Slot:
    """Return the slot with other values, in the keys that an entry of it has."""
    value: Any = dict(values)
    if slot.form.leaves == "number":
        value = values[""]
    elif slot.form.leaves != "named":
        flats = tuple(values[i] for i in _groups(setup, slot.form)) if values else ()
        value = replace(slot.value, flats=flats)
    return replace(slot, value=value, before=None)


def with_slots(
    setup: Setup, slots: Mapping[str, Slot], entries: Iterable[Entry]
) -> dict[str, Slot]:
    """Return slots in which those that are among the entries have their values."""
    own = {entry.name: entry.values for entry in entries}
    return {
        name: slot_with(setup, slot, own[name]) if name in own else slot
        for name, slot in slots.items()
    }


def _groups(setup: Setup, form: Form) -> tuple[int, ...]:
    layout = setup.layout
    return layout.trainable if form.leaves == "learning" else tuple(range(len(layout.groups)))
