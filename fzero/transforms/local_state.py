"""What local updates keep, as entries; and what a checkpoint says of replicas that train apart.

    params, optimizer/<masters>      as of a state without local updates that is at the anchors
    outer/anchors, outer/<slot>      the anchors in fp32 or wider, the state of the outer rule
    outer/coming                     mean moves of the fragments whose outer update is to come
    outer/optimizer/<slot>           what owners keep for the outer rule

All replicas have these in common. What a replica has of its own is beside it, whatever it is; so a
state without local updates, or of another number of replicas, starts at the anchors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.errors.json_form import DictForm, natural, text
from fzero.machine.named_shards import leaf_paths
from fzero.machine.offload import empty_where
from fzero.machine.packing import part_of
from fzero.optim.counters import COUNT, COUNTERS, STEP, counters_of, with_counters
from fzero.optim.entries import RULE, rule_entries, with_rule_entries
from fzero.state import Form, Outer, Placement, TrainState
from fzero.state.entry import Entry
from fzero.state.setup import MASTERS
from fzero.transforms.local import outer_of, outer_state, with_outer_record

_OUTER, _ANCHORS, _COMING = "outer/", "outer/anchors", "outer/coming"


def base_entries(state: TrainState, rank: int) -> list[Entry]:
    """Return what stands, in a state without local updates, for what replicas have of their own.

    rank: of the replica; of what is at the anchors it has its part of all parts.
    """
    setup, learning, flats = state.setup, state.setup.layout.trainable, state.params.flats
    held, own = (setup.part(x, rank) for x in (setup.optimizer_state, Placement.OVER_ALL))
    anchors = dict(zip(learning, outer_of(state).anchors.flats, strict=True))
    parts = {i: part_of(x, held, own) for i, x in anchors.items()}
    form = Form(placement=Placement.OVER_ALL)
    masters = {
        i: parts[i].to(x.dtype)
        for one in rule_entries(state, rank)
        if one.name == RULE + MASTERS and one.per_leaf
        for i, x in one.values.items()
    }
    frozen = {i: x for i, x in enumerate(flats) if i not in anchors}
    return [
        Entry(name="params", form=Form(leaves="all", placement=setup.params), values=frozen),
        Entry(name="params", form=form, values={i: x.to(flats[i].dtype) for i, x in parts.items()}),
        *([Entry(name=RULE + MASTERS, form=form, values=masters)] if masters else []),
    ]


def shared_entries(state: TrainState, rank: int) -> list[Entry]:
    """Return what replicas keep for the outer update, the same on all of them."""
    outer, setup = outer_of(state), state.setup
    learning, form = setup.layout.trainable, Form(placement=setup.optimizer_state)
    even: dict[str, dict[int, Tensor]] = {
        _ANCHORS: dict(zip(learning, outer.anchors.flats, strict=True))
    }
    owned: dict[str, Entry] = {}
    for fragment, rule in enumerate(_rule_states(state)):
        own = _leaves_in(state, fragment)
        for one in rule_entries(rule, rank):
            if one.per_leaf:
                even.setdefault(_OUTER + one.name.removeprefix(RULE), {}).update(one.values)
                continue
            values = {k: x for k, x in one.values.items() if k in own}
            old = owned.get(one.name)
            known = {} if old is None else old.values
            owned[one.name] = replace(one, name=_OUTER + one.name, values={**known, **values})
    for fragment in _coming_in(outer):
        even.setdefault(_COMING, {}).update(_coming_of(state, fragment))
    return [*(Entry(name=k, form=form, values=x) for k, x in even.items()), *owned.values()]


def with_shared(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    """Return the state in which its shared entries have these values."""
    outer, made = outer_of(state), {one.key: one.values for one in entries}
    rules, coming = list[Any](), list(outer.coming)
    for fragment, rule in enumerate(_rule_states(state)):
        own, new = _leaves_in(state, fragment), list[Entry]()
        for one in rule_entries(rule, 0):
            name = _OUTER + (one.name.removeprefix(RULE) if one.per_leaf else one.name)
            some = made.get((name, one.form.leaves), {})
            values = {k: x for k, x in some.items() if one.per_leaf or k in own}
            new.append(replace(one, values={**one.values, **values}))
        rules.append(with_rule_entries(rule, new))
    for fragment in _coming_in(outer):
        some = {**_coming_of(state, fragment), **made.get((_COMING, "learning"), {})}
        flats = tuple(some[i] for i in _coming_of(state, fragment))
        coming[fragment] = replace(coming[fragment], flats=flats)
    anchors = made.get((_ANCHORS, "learning"))
    if anchors is not None:
        flats = tuple(anchors[i] for i in state.setup.layout.trainable)
        outer = replace(outer, anchors=replace(outer.anchors, flats=flats))
    return with_outer_record(state, replace(outer, optimizers=tuple(rules), coming=tuple(coming)))


# What a manifest says.


def replica_facts(state: TrainState, counters: Any) -> dict[str, Any]:
    """Return what a replica says of itself. counters: as a manifest has them."""
    return {"counters": counters, "counts": bool(outer_of(state).weight.all())}


def common_facts(state: TrainState, replicas: Sequence[Any]) -> dict[str, Any]:
    """Return what a manifest says of all replicas; of each what `replica_facts` gives."""
    outer = outer_of(state)
    coming = {"fragments": _coming_in(outer), "timing": _timing(outer)}
    return {
        "replicas": replicas,
        "updates": outer.updates,
        "outer_updates": [int(one.count) for one in outer.optimizers],
        "outer_counters": [counters_of(one) for one in _rule_states(state)],
        "outer": _kept_by_rule(state),
        **({"coming": coming} if coming["fragments"] else {}),
    }


def facts_form(counters: DictForm) -> DictForm:
    """Return what `common_facts` can be in a file. counters: what those of a state can be."""
    rule = DictForm(must={"count": COUNTERS.may["count"]}, may=COUNTERS.may, others=COUNTERS.others)
    is_bool = DictForm(must={"counters": counters, "counts": lambda x: type(x) is bool})
    return DictForm(
        must={
            "replicas": [is_bool],
            "updates": natural,
            "outer_updates": [natural],
            "outer": text,
        },
        may={
            "coming": DictForm(must={"fragments": [natural], "timing": text}),
            "outer_counters": [rule],
        },
    )


def are_as_many(state: TrainState, facts: Mapping[str, Any]) -> bool:
    """Whether as many replicas were saved as this state has."""
    return len(facts["replicas"]) == outer_of(state).mesh.replicas.size


def with_facts(state: TrainState, like: TrainState, facts: Mapping[str, Any], replica: int) -> Any:
    """Return a state with an outer record that has the saved numbers, and room for what comes.

    like: has an outer record. replica: of this state, among as many as were saved; else -1.
    """
    state = with_outer_record(state, outer_of(like))
    outer, old = outer_of(state), [{COUNT: count, STEP: count} for count in facts["outer_updates"]]
    counters, count = facts.get("outer_counters", old), len(outer.anchors.flats)
    if len(counters) != outer.local.fragments:
        counters = [max(counters, key=lambda one: one[COUNT])] * outer.local.fragments
    made = [
        with_counters(one, lambda slot: slot.flat, some)
        for one, some in zip(_rule_states(state), counters, strict=True)
    ]
    coming = [replace(outer.anchors, flats=())] * outer.local.fragments
    weight, updates = outer.weight, 0
    if replica >= 0:
        weight = torch.full_like(weight, float(facts["replicas"][replica]["counts"]))
        updates = facts["updates"] % outer.local.every
        for fragment in _comes(facts):
            numbers = outer.local.numbers_in(fragment, count)
            flats = tuple(empty_where(outer.anchors.flats[k]) for k in numbers)
            coming[fragment] = replace(outer.anchors, flats=flats)
    after = {"coming": tuple(coming), "weight": weight, "updates": updates}
    return with_outer_record(state, replace(outer, optimizers=tuple(made), **after))


def require_facts(state: TrainState, facts: Mapping[str, Any], where: object, name: str) -> None:
    """Warn where replicas do not go on as they were; raise `LayoutError` for another outer rule.

    where: what is saved is. name: of the call.
    """
    outer = state.outer
    if outer is not None and facts["outer"] != _kept_by_rule(state):
        raise LayoutError(
            f"load: the outer rule of {where} keeps {facts['outer']}, that of this state "
            f"{_kept_by_rule(state)}.",
            cause="the state was made with another `outer` than the saved one.",
            fix="make it with the one that was saved; to go on with another one, load into a state "
            "without local updates, and make one of its fzero.full_params. Nothing was changed.",
        )
    there, here = len(facts["replicas"]), 1 if outer is None else outer.mesh.replicas.size
    coming = _comes(facts)
    if outer is not None and there == here and coming and not _fits(outer, facts):
        raise LayoutError(
            f"load: in {where} fragments {coming} are to arrive, with {facts['coming']['timing']}; "
            f"this state has {_timing(outer)}.",
            cause="the state was made with other options of fzero.local than the saved one.",
            fix="make it with those; or save where nothing is to arrive. Nothing was changed.",
        )
    if outer is None or there != here:
        now = "a state without local updates" if outer is None else f"{here} replicas"
        seen = explain(
            f"{name}: {where} has {there} replicas, {facts['updates']} updates after their last "
            f"outer update, and goes on in {now}: training starts at the anchors, with the "
            "optimizer state of replica 0.",
            cause="another mesh than the one of before.",
            fix=f"nothing, if that is meant; {name} on as many replicas to go on with theirs.",
        )
        warnings.warn(seen, UserWarning, stacklevel=2)


def _rule_states(state: TrainState) -> list[TrainState]:
    """Return, for each fragment, a state whose optimizer is the outer rule."""
    return [outer_state(state, fragment) for fragment in range(outer_of(state).local.fragments)]


def _leaves_in(state: TrainState, fragment: int) -> set[str]:
    """Return the names of the leaves in a fragment."""
    layout, names = state.setup.layout, leaf_paths(state.setup.layout)
    numbers = outer_of(state).local.numbers_in(fragment, len(layout.trainable))
    return {names[leaf] for k in numbers for leaf in layout.groups[layout.trainable[k]].leaves}


def _kept_by_rule(state: TrainState) -> str:
    """Return what tells outer rules apart: what they keep; of one that needs a matrix its name."""
    rule: Any = state.setup.layout.options.outer
    one = _rule_states(state)[0]
    slots = [name for name in rule.slots(one.optimizer) if name != MASTERS]
    name = "" if rule.elementwise else f"{rule.saved_names(one.optimizer, []).rule}: "
    return name + " ".join(["anchors", *slots])


def _coming_in(outer: Outer) -> list[int]:
    """Return the fragments whose outer update is to come."""
    return [fragment for fragment, one in enumerate(outer.coming) if one.held]


def _coming_of(state: TrainState, fragment: int) -> dict[int, Tensor]:
    """Return {group: the mean move} of a fragment whose outer update is to come."""
    outer, learning = outer_of(state), state.setup.layout.trainable
    groups = [learning[k] for k in outer.local.numbers_in(fragment, len(learning))]
    return dict(zip(groups, outer.coming[fragment].flats, strict=True))


def _comes(facts: Mapping[str, Any]) -> list[int]:
    return facts.get("coming", {"fragments": []})["fragments"]


def _fits(outer: Outer, facts: Mapping[str, Any]) -> bool:
    """Whether the fragments that are to arrive do so in this state, at the same updates."""
    same = facts["coming"]["timing"] == _timing(outer)
    return same and max(_comes(facts)) < outer.local.fragments


def _timing(outer: Outer) -> str:
    local = outer.local
    return f"every={local.every}, fragments={local.fragments}, delay={local.delay}"
