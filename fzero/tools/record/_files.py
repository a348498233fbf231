"""A recording in a folder: texts in JSON, tensors as safetensors, states as checkpoints.

recording.json              the form of the state, the states that are kept, the updates
state-<call>/               a checkpoint
rank-<rank>.json            each call of a rank: its inputs, with names for their tensors
rank-<rank>.safetensors     those tensors, and the digests
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.elements import (
    Draft,
    Form,
    begin_file,
    read_file,
    read_values,
    rng_text,
    write_draft,
    write_values,
)
from fzero.checkpoint.everywhere import CheckpointError, Ranks, damaged, everywhere
from fzero.errors import LayoutError
from fzero.state import Placement
from fzero.tools.record._digest import DigestedLeaf
from fzero.tools.record._records import RecordedCall, RecordedForm, RecordedPart, Snapshot

HEAD = "recording.json"
_VERSION = 1


def write_folder(
    recording: RecordedPart, folder: Path, own_ranks: Sequence[int], ranks: Ranks
) -> None:
    """Write this process's part of a recording. A collective."""

    def head() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.axis.rank == 0:
            for kept in recording.kept:
                target = folder / kept.name
                if isinstance(kept.held, Path) and target.resolve() != kept.held.resolve():
                    shutil.copytree(kept.held, target, dirs_exist_ok=True)
            (folder / HEAD).write_text(json.dumps(_head_of(recording)))

    def own() -> None:
        for place, rank in enumerate(own_ranks):
            _write_rank(recording, folder, place, rank)

    everywhere(ranks, head, what=f"write {folder}")
    for kept in recording.kept:
        if isinstance(kept.held, Draft):
            write_draft(kept.held, folder / kept.name)
    everywhere(ranks, own, what=f"write {folder}")


def read_folder(folder: Path) -> RecordedPart:
    """Return what all ranks have written. Raises `CheckpointError` as `load_recording`."""
    if not (folder / HEAD).is_file():
        raise CheckpointError(
            f"there is no recording at {folder}.",
            cause="a mistyped path, or a save that was cut off.",
            fix="pass the folder of recording.save(folder).",
        )
    try:
        head = json.loads((folder / HEAD).read_text())
        form = _form_in(head)
        parts = [_read_rank(folder, rank) for rank in range(form.world_size)]
        return RecordedPart(
            form=form,
            kept=tuple(
                Snapshot(
                    call=one["call"],
                    updates=one["updates"],
                    held=folder / Path(one["path"]).name,
                    places=_stacked([more.get(f"state/{one['call']}") for _, more in parts]),
                )
                for one in head["kept"]
            ),
            calls=tuple(_joined([part[n] for part, _ in parts]) for n in range(len(parts[0][0]))),
            updates=head["updates"],
            last=_stacked([more.get("last") for _, more in parts]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(folder, f"is no recording: {type(error).__name__}: {error}") from None


def _head_of(recording: RecordedPart) -> dict[str, Any]:
    form = recording.form
    leaves = [[leaf.name, leaf.placement.value] for leaf in form.leaves]
    return {
        "version": _VERSION,
        "form": {
            "stage": form.stage,
            "world_size": form.world_size,
            "shards": form.shards,
            "driver": form.driver,
            "apart": form.apart,
            "leaves": leaves,
        },
        "updates": recording.updates,
        "kept": [
            {"call": kept.call, "updates": kept.updates, "path": kept.name}
            for kept in recording.kept
        ],
    }


def _form_in(head: dict[str, Any]) -> RecordedForm:
    if head["version"] != _VERSION:
        raise ValueError(f"version {head['version']}")
    leaves = tuple(DigestedLeaf(name, Placement(value)) for name, value in head["form"]["leaves"])
    return RecordedForm(**{**head["form"], "leaves": leaves})


# The part of one rank.


def _write_rank(recording: RecordedPart, folder: Path, place: int, rank: int) -> None:
    tensors: dict[str, Tensor] = {}
    texts, calls = dict[str, int](), []
    for call in recording.calls:
        name = f"{call.number}"
        found = call.generators[place]
        text = found if isinstance(found, str) else rng_text(found)
        if call.words is not None:
            tensors[f"{name}/words"] = call.words[place]
        calls.append(
            {
                "number": call.number,
                "updates": call.updates,
                "generators": texts.setdefault(text, len(texts)),
                "inputs": _encoded(call.inputs[place], f"{name}/inputs", tensors),
            }
        )
    if recording.last is not None:
        tensors["last"] = recording.last[place]
    for kept in recording.kept:
        if kept.places is not None:
            tensors[f"state/{kept.call}"] = kept.places[place]
    (folder / f"rank-{rank:05d}.json").write_text(
        json.dumps({"calls": calls, "generators": list(texts)})
    )
    flat = {name: x.contiguous() for name, x in tensors.items()}
    places = begin_file(
        folder / f"rank-{rank:05d}.safetensors",
        {name: Form(tuple(x.shape), x.dtype) for name, x in flat.items()},
    )
    for name, x in flat.items():
        write_values(places[name], x)


def _read_rank(folder: Path, rank: int) -> tuple[list[RecordedCall], dict[str, Tensor]]:
    """Return a rank's calls; and its digests of the last state, and of states that were kept."""
    texts = folder / f"rank-{rank:05d}.json"
    if not texts.is_file():
        raise CheckpointError(
            f"{folder} has no part of rank {rank}.",
            cause="recording.save(folder) on some ranks only, or folders of several hosts.",
            fix="save on every rank, to one file system, or copy the files together.",
        )
    held = json.loads(texts.read_text())
    places = read_file(folder / f"rank-{rank:05d}.safetensors")

    def tensor(name: str) -> Tensor | None:
        return read_values(places[name]) if name in places else None

    calls = []
    for one in held["calls"]:
        words = tensor(f"{one['number']}/words")
        calls.append(
            RecordedCall(
                number=one["number"],
                updates=one["updates"],
                inputs=(_decoded(one["inputs"], lambda name: read_values(places[name])),),
                devices=(),
                generators=(held["generators"][one["generators"]],),
                words=None if words is None else words[None],
            )
        )
    more = [name for name in places if name == "last" or name.startswith("state/")]
    return calls, {name: read_values(places[name]) for name in more}


def _joined(calls: list[RecordedCall]) -> RecordedCall:
    """One call of all ranks, from the call of each."""
    if len({(call.number, call.updates) for call in calls}) > 1:
        raise ValueError("the ranks have recorded other calls")
    return replace(
        calls[0],
        inputs=tuple(call.inputs[0] for call in calls),
        generators=tuple(call.generators[0] for call in calls),
        words=_stacked([None if call.words is None else call.words[0] for call in calls]),
    )


def _stacked(rows: list[Tensor | None]) -> Tensor | None:
    held = [row for row in rows if row is not None]
    return torch.stack(held) if len(held) == len(rows) else None


# Inputs as JSON, with names for tensors.


def _encoded(x: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(x, Tensor):
        tensors[name] = x
        return {"tensor": name}
    if x is None or isinstance(x, bool | int | float | str):
        return {"value": x}
    if type(x) in (tuple, list):
        items = [_encoded(one, f"{name}.{i}", tensors) for i, one in enumerate(x)]
        return {"tuple" if type(x) is tuple else "list": items}
    if type(x) is dict and all(isinstance(key, str) for key in x):
        return {"dict": {key: _encoded(one, f"{name}.{key}", tensors) for key, one in x.items()}}
    raise LayoutError(
        f"recording.save: an input is a {type(x).__name__} ({name}).",
        cause="an object of a class of your own among the inputs of a step.",
        fix="give the step tensors, numbers, texts, and tuples, lists and dicts of them; a "
        "recording that is not saved holds any object.",
    )


def _decoded(x: dict[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    ((kind, value),) = x.items()
    if kind == "tensor":
        return tensor(value)
    if kind == "dict":
        return {key: _decoded(one, tensor) for key, one in value.items()}
    if kind in ("tuple", "list"):
        items = [_decoded(one, tensor) for one in value]
        return tuple(items) if kind == "tuple" else items
    return value
