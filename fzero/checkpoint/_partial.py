"""Partial loads: which parts of a checkpoint have a place in a state of another model.

renamed    a manifest with other names; a tied parameter at each name that is one of its own here
partial    what is in both, in which shapes; what is left begins as in the state that is given
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fzero.checkpoint._pieces import form_in
from fzero.checkpoint.collective import damaged
from fzero.checkpoint.engine_state import buffers_of
from fzero.checkpoint.manifest import LEFT_OUT, Manifest, facts_of_state, require_fit
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_numbers, leaf_paths
from fzero.machine.offload import empty_where
from fzero.machine.packing import leaf_ranges
from fzero.optim.counters import COUNT, STEP, UNSTEPPED
from fzero.optim.entries import RULE
from fzero.state import Placement, Setup, TrainState
from fzero.state.entry import Entry
from fzero.state.layout import ENCODED
from fzero.state.setup import MASTERS
from fzero.transforms.state_entries import PARAMS, entries_of, numbers_of, trains_apart

Rename = Callable[[str], str | None]
"""The name of a parameter or buffer in a checkpoint -> its name here; None: it is left out."""

Shape = tuple[int, ...]
_LEAF = re.compile(r"\(([0-9, ]*)\) (torch\.\w+) (trainable|frozen)(.*)")


class LoadReport(NamedTuple):
    """What a partial load has found: names of parameters, and of the buffers of an engine's module.

    Attributes:
        missing: what the checkpoint has not: it is as in the state that was given.
        unexpected: what the state has not: it was left out.
        resized: what has another size there: what is in both has the saved values.
    """

    missing: list[str]
    unexpected: list[str]
    resized: list[str]


# Names.


def renamed(
    saved: Manifest, groups: list[list[str]], rename: Rename | None, state: TrainState
) -> tuple[Manifest, list[list[str]]]:
    """Return a manifest, and the names in each param group, under the names that they have here.

    Raises `LayoutError` where two get one name.
    """
    tied = {name: [name] for name in saved.leaves}
    for other, name in saved.tied.items():
        tied.get(name, []).append(other)
    wanted = leaf_numbers(state.setup.layout)
    if rename is None and (not saved.tied or saved.leaves.keys() == wanted.keys()):
        return saved, groups
    require_one_replica(state)
    taken: dict[str, str] = {}

    def names(old: str) -> list[str]:
        """Return where a value goes: to each of its names that the state has, or its first one."""
        asked = [new for one in tied.get(old, [old]) if (new := new_name(rename, one)) is not None]
        found = [*dict.fromkeys(new for new in asked if new in wanted)] or asked[:1]
        for new in found:
            require_one(taken, new, old)
        return found

    def keyed(some: Any) -> Any:
        if not isinstance(some, dict):
            return some
        return {new: x for old, x in some.items() for new in names(old)}

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, entry in saved.tensors.items():
            known = saved.module["buffers"] if name.startswith("buffers/") else saved.leaves
            cuts = (k for k, x in enumerate(name) if x == "/" and name[k + 1 :] in known)
            cut = next(cuts, None)
            if cut is None:
                yield name, entry
                continue
            for new in names(name[cut + 1 :]):
                yield f"{name[: cut + 1]}{new}", entry

    counters = dict(saved.counters)
    counters["optimizer"] = {k: keyed(x) for k, x in counters["optimizer"].items()}
    if UNSTEPPED in counters:
        counters[UNSTEPPED] = [new for old in counters[UNSTEPPED] for new in names(old)]
    kept = {
        name: {**one, "values": keyed(one["values"]) if _by_leaf(one, saved) else one["values"]}
        for name, one in saved.kept.items()
    }
    made = replace(
        saved,
        leaves=keyed(saved.leaves),
        slots={name: keyed(some) for name, some in saved.slots.items()},
        counters=counters,
        module={**saved.module, "buffers": keyed(saved.module["buffers"])},
        tensors=dict(tensors()),
        kept=kept,
    )
    return made, [[new for old in some for new in names(old)] for some in groups]


def require_one_replica(state: TrainState) -> None:
    """Raise `LayoutError` for a state with local updates."""
    if trains_apart(state):
        raise LayoutError(
            "load: rename= or strict=False, of a state with local updates.",
            cause="replicas that train apart have a part of a checkpoint each.",
            fix="load into a state without local updates, and make one with them of its "
            "fzero.full_params.",
        )


def require_one(taken: dict[str, str], new: str, old: str) -> None:
    """Note that `new` is called `old` in the checkpoint; raise `LayoutError` if another is, too."""
    if taken.setdefault(new, old) != old:
        raise LayoutError(
            f"load: {taken[new]} and {old} of the checkpoint are both to be {new}.",
            cause="a `rename` that gives two values one name.",
            fix="return None for the one that is to be left out. Nothing was changed.",
        )


def new_name(rename: Rename | None, name: str) -> str | None:
    """Return the name that something has here. Raises `LayoutError` for what is no name."""
    new = name if rename is None else rename(name)
    if not isinstance(new, str | None):
        raise LayoutError(
            f"load: rename({name!r}) returned a {type(new).__name__}.",
            cause="a function that returns something else than a name.",
            fix="return the name of it in the state, or None to leave it out.",
        )
    return new


def _by_leaf(kept: Mapping[str, Any], saved: Manifest) -> bool:
    return kept["values"].keys() <= saved.leaves.keys()


# Shapes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """What of a checkpoint goes where in the state of one rank."""

    saved: Manifest
    report: LoadReport
    shapes: Mapping[str, Shape]  # of what is resized: the saved one
    common: Collection[str]  # parameters that are in both
    fresh: Collection[str]  # of those that learn: what the optimizer keeps of them begins
    begun: Mapping[tuple[str, str], Entry] = field(default_factory=dict[tuple[str, str], Entry])

    def room(self, setup: Setup, entry: Entry, rank: int, texts: Mapping[str, str]) -> Entry:
        """Return an entry with the values that stay where nothing is read.

        texts: what the manifest says of its tensors.
        """
        new = self.begun.get(entry.key) if is_moment(entry) else None
        names, values = leaf_paths(setup.layout), dict[Any, Tensor]()
        for key, x in entry.values.items():
            if entry.placement is Placement.OWNER:
                source = x if new is None or key not in self.fresh else new.values[key]
                values[key] = source.clone()
                if key in texts and key in entry.owned and key not in {*self.fresh, *self.shapes}:
                    form = form_in(f"{entry.name}/{key}", texts[key])
                    if form is not None and form[0] != tuple(x.shape):  # one that steps make
                        values[key] = x.new_zeros(form[0], dtype=form[1])
                continue
            values[key] = empty_where(x).copy_(x)
            if new is None or not entry.per_leaf:
                continue
            codec = entry.codecs.get(key)
            layout = setup.layout if codec is None else codec.layout(setup.layout)
            for own in leaf_ranges(layout, key, setup.part(entry.placement, rank)):
                if names[own.leaf] in self.fresh:
                    own.of(values[key]).copy_(own.of(new.values[key]))
        return replace(entry, values=values)

    def covers(self, setup: Setup, entry: Entry) -> bool:
        """Whether a slot has, in the checkpoint, all parameters that are in both."""
        paths, layout = leaf_paths(setup.layout), setup.layout
        leaves = (x for i in entry.values for x in layout.groups[i].leaves)
        some = (paths[x] for x in leaves if layout.leaves[x].numel and paths[x] in self.common)
        return all(f"{entry.name}/{name}" in self.saved.tensors for name in some)

    def reads(self, entry: Entry, name: str) -> bool:
        """Whether a tensor of an entry is read as it is: it is there, in the shape of here."""
        leaf = name.removeprefix(f"{entry.name}/")
        begins = is_moment(entry) and leaf in self.fresh
        of_leaves = entry.per_leaf or entry.placement is Placement.OWNER
        resized = of_leaves and leaf in self.shapes
        return name in self.saved.tensors and not resized and not begins

    def source(self, entry: Entry, leaf: str) -> tuple[str, Shape | None] | None:
        """Return the tensor that has other values of a leaf than `reads`, and its shape, if other.

        A master that the file has not is made of the parameter.
        """
        name = f"{entry.name}/{leaf}"
        if is_moment(entry) and leaf in self.fresh:
            return None
        if name not in self.saved.tensors and entry.name == RULE + MASTERS:
            name = f"{PARAMS}/{leaf}"
        elif leaf not in self.shapes:
            return None
        return (name, self.shapes.get(leaf)) if name in self.saved.tensors else None


def is_moment(entry: Entry) -> bool:
    """Whether an optimizer keeps it of a parameter, beside a value of it."""
    return entry.name.startswith(RULE) and entry.name != RULE + MASTERS


def partial_of(
    saved: Manifest, state: TrainState, where: object, module: nn.Module | None
) -> Partial:
    """Return what is in both. module: of an engine.

    Raises `LayoutError` where nothing is in both.
    """
    require_one_replica(state)
    layout, rule = state.setup.layout, state.setup.optimizer
    theirs = {name: text for name, text in saved.leaves.items() if not text.endswith(LEFT_OUT)}
    ours = dict(zip(leaf_paths(layout), layout.leaves, strict=True))
    shapes, fresh = dict[str, Shape](), {name for name, leaf in ours.items() if leaf.trainable}
    common = [name for name in ours if name in theirs]
    for name in common:
        shape, learned = _parsed(theirs[name], name, where)
        if shape != ours[name].shape:
            shapes[name] = shape
        if learned and not (name in shapes and rule.made_by_steps(ours[name])):
            fresh.discard(name)
    forms = {name: one["0"] for name, one in saved.module["buffers"].items()}
    buffers: dict[str, Any] = {} if module is None or not forms else buffers_of(module)
    forms = forms if buffers else {}
    for name in buffers.keys() & forms.keys():
        shape, _ = _parsed(f"{forms[name]} frozen", name, where)
        if shape != tuple(buffers[name].shape):
            shapes[name] = shape
    every, known = [*ours, *buffers], {*saved.leaves, *forms}
    require_some("load", where, known, every)
    report = LoadReport(
        [name for name in every if name not in known],
        [name for name in (*theirs, *forms) if name not in {*every}],
        [name for name in every if name in shapes],
    )
    return Partial(saved=saved, report=report, shapes=shapes, common=common, fresh=fresh)


def require_some(call: str, where: object, known: Collection[str], wanted: Collection[str]) -> None:
    """Raise `LayoutError` where a partial load would have nothing to read."""
    if wanted and {*known}.isdisjoint(wanted):
        raise LayoutError(
            f"{call}: nothing in {where} has the name of something in this state: there are "
            f"{sorted(known)[:4]}, wanted are {[*wanted][:4]}.",
            cause="names with another prefix, or another model.",
            fix="give rename=, from a name in the checkpoint to that in the state.",
        )


def _parsed(text: str, name: str, where: object) -> tuple[Shape, bool]:
    """Return shape and whether it learned, of what a manifest says."""
    if (found := _LEAF.fullmatch(text)) is None:
        raise damaged(where, f"has {name} as {text!r:.80}")
    return tuple(int(size) for size in found[1].split(",") if size.strip()), found[3] == "trainable"


def with_begun(
    one: Partial, state: TrainState, begun: TrainState, rank: int, where: object
) -> Partial:
    """Return it with counters of all leaves, and what the optimizer keeps of new ones.

    begun: the state with a new optimizer state. rank: in its replica. Raises `LayoutError`, as
    `load` does, where what is in both does not fit: but for its shape, and for what learns.
    """
    saved = one.saved
    if one.fresh and begun.setup.optimizer.counts_by_leaf:
        saved = replace(saved, counters=_counted(one, begun))
    wanted = facts_of_state(state)
    leaves, learns = dict[str, str](), set[str]()
    for name in one.common:
        ours, theirs = (_LEAF.fullmatch(x.leaves[name]) for x in (wanted, saved))
        assert ours is not None and theirs is not None
        dims = [len(_parsed(x.leaves[name], name, where)[0]) for x in (wanted, saved)]
        may = dims[0] == dims[1] and (ours[1] == theirs[1] or ENCODED not in ours[4])
        like = f"({ours[1]}) {theirs[2]} {ours[3]}{theirs[4]}"
        leaves[name] = like if may else saved.leaves[name]
        if ours[3] == "trainable" and name not in one.fresh:
            learns.add(name)

    def inside(facts: Manifest, leaves: dict[str, str]) -> Manifest:
        slots = {x: {k: v for k, v in s.items() if k in learns} for x, s in facts.slots.items()}
        kept = {
            x: {**some, "values": {k: v for k, v in some["values"].items() if k in leaves}}
            for x, some in facts.kept.items()
            if some["form"] != "named" and _by_leaf(some, facts)
        }
        return replace(facts, leaves=leaves, slots=slots, kept=kept)

    ours = {name: wanted.leaves[name] for name in one.common}
    require_fit(inside(saved, leaves), inside(wanted, ours), where)
    entries = {x.key: x for x in entries_of(begun, rank) if is_moment(x)} if one.fresh else {}
    return replace(one, saved=saved, begun=entries)


def _counted(one: Partial, begun: TrainState) -> dict[str, Any]:
    """Return the counters of a manifest, with those of a new optimizer state for new parameters.

    A new parameter takes a counter that its param group shares from the others of the group.
    """
    layout, rule = begun.setup.layout, begun.setup.optimizer
    theirs = dict(one.saved.counters["optimizer"])
    theirs.setdefault(STEP, theirs.get(COUNT, 0))
    groups = rule.param_groups(layout.leaves, 0).of_leaf
    triples = zip(leaf_paths(layout), layout.leaves, groups, strict=True)
    learning = {name: (leaf.path, group) for name, leaf, group in triples if group >= 0}
    kept = {group: name for name, (_, group) in reversed(learning.items()) if name not in one.fresh}
    for counter, begin in numbers_of(begun)["optimizer"].items():
        if counter == COUNT or counter not in theirs:
            continue
        of_leaf = dict[str, Any]()
        for name, (path, group) in learning.items():
            counts, source = theirs[counter], name
            if name in one.fresh:
                shared = rule.shares(path, counter) and group in kept
                counts, source = (counts, kept[group]) if shared else (begin, name)
            of_leaf[name] = counts.get(source) if isinstance(counts, dict) else counts
        theirs[counter] = {name: x for name, x in of_leaf.items() if x is not None}
    counters = {**one.saved.counters, "optimizer": theirs}
    if theirs.get(COUNT):
        counters[UNSTEPPED] = sorted({*counters.get(UNSTEPPED, ()), *one.fresh})
    return counters
