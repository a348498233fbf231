"""What each field of a recording in a folder can be. Pure.

A checksum finds damage; it does not tell who wrote a file. So nothing is used before it was found
to have the form that `save` gives it, and to agree with the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.folders import DictForm
from fzero.checkpoint.manifest import Manifest
from fzero.state import Placement
from fzero.tools.record._inputs import is_inputs, names_in
from fzero.tools.record._records import RecordedForm, Snapshot

DATA = re.compile(r"calls-[0-9a-f]{16}")
_PLACEMENTS = {one.value for one in Placement if one is not Placement.PARTIAL}
_FILES = r"rank-[0-9]{5}\.(json|safetensors)|state-[0-9]{8,19}/checkpoint\.json"


def _natural(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _flag(x: Any) -> bool:
    return type(x) is bool


HEAD_FORM = DictForm(
    must={
        "form": DictForm(
            must={
                "stage": lambda x: _natural(x) and x < 4,
                "world_size": lambda x: _natural(x) and 0 < x < 2**20,
                "shards": lambda x: _natural(x) and x > 0,
                "driver": lambda x: x in ("step", "engine"),
                "apart": _flag,
                "leaves": [(_text, lambda x: isinstance(x, str) and x in _PLACEMENTS)],
            }
        ),
        "updates": _natural,
        "digests": _flag,  # whether there are some of each state
        "last": _flag,  # and of the one after the last call
        "kept": [DictForm(must={"call": _natural, "updates": _natural})],
        "data": lambda x: isinstance(x, str) and DATA.fullmatch(x) is not None,
        "files": DictForm(others=(_natural, _natural), names=_FILES),
    }
)
"""The body of recording.json, without its format."""

PART_FORM = DictForm(
    must={
        "calls": [
            DictForm(
                must={
                    "number": _natural,
                    "updates": _natural,
                    "generators": _natural,
                    "inputs": is_inputs,
                }
            )
        ],
        "generators": [_text],
    }
)
"""What rank-<rank>.json has."""


def rank_names(rank: int) -> tuple[str, str]:
    """Return the names of the files of a rank: the texts, and the tensors."""
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def misfits_of_head(head: Mapping[str, Any]) -> Iterator[str]:
    """Say what does not fit within recording.json."""
    form, kept = head["form"], head["kept"]
    if form["world_size"] % form["shards"]:
        yield f"it has {form['world_size']} ranks, and replicas of {form['shards']}"
    names = [name for name, _ in form["leaves"]]
    if len({*names}) != len(names):
        yield "it has a leaf twice"
    numbers = [one["call"] for one in kept]
    if not kept or numbers != sorted({*numbers}) or not _ascend([one["updates"] for one in kept]):
        yield f"its states are not in order: {kept!r:.80}"
    wanted = {name for rank in range(form["world_size"]) for name in rank_names(rank)}
    wanted |= {f"{Snapshot.name_of(number)}/checkpoint.json" for number in numbers}
    if odd := wanted ^ {*head["files"]}:
        yield f"it has no {min(odd)}, or too much of it"


def misfits_of_part(
    head: Mapping[str, Any], part: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Iterator[str]:
    """Say what does not fit the head in the part of a rank. tensors: {name: with its form}."""
    calls, kept = part["calls"], head["kept"]
    numbers = [call["number"] for call in calls]
    if not calls or numbers != sorted({*numbers}) or numbers[0] < kept[0]["call"]:
        yield f"its calls are not in order: {numbers!r:.80}"
    if not _ascend([*(call["updates"] for call in calls), head["updates"]]):
        yield "its updates are not in order"
    before = {call["number"]: call["updates"] for call in calls}
    for one in kept:
        if before.get(one["call"], one["updates"]) != one["updates"]:
            yield f"call {one['call']} has other updates than the state before it"
    if any(call["generators"] >= len(part["generators"]) for call in calls):
        yield "a call has generators that are not there"
    inputs = [name for call in calls for name in names_in(call["inputs"])]
    digests = [f"{number}/words" for number in numbers if head["digests"]]
    digests += [f"state/{one['call']}" for one in kept if head["digests"]]
    digests += ["last"] if head["last"] else []
    if odd := {*inputs, *digests} ^ {*tensors} or len({*inputs}) != len(inputs):
        yield f"its tensors are not those of its calls: {odd!r:.80}"
        return
    wanted = (len(head["form"]["leaves"]),), torch.int64
    for name in digests:
        if (tensors[name].form.shape, tensors[name].form.dtype) != wanted:
            yield f"{name} is {tensors[name].form!r:.80}, and no digests"


def misfits_of_ranks(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say where ranks have recorded other calls."""
    calls = [[(call["number"], call["updates"]) for call in part["calls"]] for part in parts]
    for rank, some in enumerate(calls):
        if some != calls[0]:
            yield f"rank {rank} has recorded other calls than rank 0"


def misfits_of_state(form: RecordedForm, updates: int, saved: Manifest) -> Iterator[str]:
    """Say what of a state that was kept does not fit the recording."""
    found = saved.origin["stage"], saved.origin["ranks"], saved.counters["step"]
    if found != (form.stage, form.world_size, updates):
        yield "it is of another stage, of other ranks, or of another update"
    params = {f"parameter {name}" for name in saved.leaves}
    kept = {f"{slot} {name}" for slot in saved.slots for name in saved.leaves}
    if not params <= {*form.names} <= params | kept:
        yield "it is of other parameters, or of another optimizer"


def _ascend(numbers: Sequence[int]) -> bool:
    return [*numbers] == sorted(numbers)


def rows_of(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all ranks as one tensor; None where they have none."""
    held = [row for row in rows if row is not None]
    return torch.stack(held) if len(held) == len(rows) else None
