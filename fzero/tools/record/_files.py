"""A recording in a folder: texts in JSON, tensors as safetensors, states as checkpoints.

recording.json                what it is, and the size and checksum of each file
calls-<random>/               another one for each save: recording.json says which one counts
    state-<call>/             a checkpoint, which has checksums of its own
    rank-<rank>.json          each call of a rank: its inputs, with names for their tensors
    rank-<rank>.safetensors   those tensors, and the digests
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    everywhere,
    from_first,
    results_of_ranks,
)
from fzero.checkpoint.elements import (
    Draft,
    TensorForm,
    begin_file,
    read_file,
    read_values,
    rng_text,
    write_draft,
    write_values,
)
from fzero.checkpoint.folders import (
    LOCK,
    Kind,
    digest_of_file,
    kept,
    make_folder,
    put_sealed,
    read_sealed,
    read_text,
    require_whole,
    sweep,
    sync,
    sync_files,
)
from fzero.checkpoint.manifest import MANIFEST, read_manifest
from fzero.errors import LayoutError
from fzero.state import Placement
from fzero.tools.record._digest import DigestedLeaf
from fzero.tools.record._inputs import decoded, encoded
from fzero.tools.record._records import RecordedCall, RecordedForm, RecordedPart, Snapshot

HEAD, _KEY, _FORMAT = "recording.json", "recording", 2


def write_folder(
    recording: RecordedPart, folder: Path, own_ranks: Sequence[int], ranks: Ranks
) -> None:
    """Write this process's part of a recording; the one that is there counts until all is written.

    A collective. Raises `LayoutError` for a recording that was loaded from there.
    """
    what, first = f"write {folder}", ranks.axis.rank == 0

    def encode() -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
        _require_elsewhere(recording, folder)
        return [_part_of(recording, place) for place in range(len(own_ranks))]

    parts = everywhere(ranks, encode, what=what)
    try:
        with ExitStack() as until_written:

            def make() -> str:
                until_written.enter_context(kept(folder, makes=_RECORDING))
                return make_folder(folder, _RECORDING)

            name = from_first(ranks, make, what=what)
            data = folder / name
            _write_states(recording, data, ranks)

            def own() -> dict[str, list[int]]:
                files = {}
                for rank, part in zip(own_ranks, parts, strict=True):
                    files |= _write_rank(data, rank, *part)
                if first:
                    heads = [f"{one.name}/{MANIFEST}" for one in recording.kept]
                    files |= {head: digest_of_file(data / head) for head in heads}
                return files

            told = results_of_ranks(ranks, own, what=what)
            files = {file: digest for some in told for file, digest in some.items()}

            def commit() -> None:
                sync(data)
                body = {"format": _FORMAT, **_head_of(recording), "data": name, "files": files}
                put_sealed(folder / HEAD, _KEY, body, through=data / HEAD)
                sync(folder)

            from_first(ranks, commit, what=what)
    finally:
        if first and folder.is_dir():
            sweep(folder, _RECORDING)


def _write_states(recording: RecordedPart, data: Path, ranks: Ranks) -> None:
    """Write the states that are kept. A collective."""

    def copy() -> None:
        for one in recording.kept if ranks.axis.rank == 0 else ():
            if isinstance(one.held, Path):
                shutil.copytree(one.held, data / one.name, ignore=shutil.ignore_patterns(LOCK))
                sync_files([x for x in (data / one.name).rglob("*") if x.is_file()])

    everywhere(ranks, copy, what=f"copy states to {data}")
    for one in recording.kept:
        if isinstance(one.held, Draft):
            write_draft(one.held, data / one.name)


def read_folder(folder: Path) -> RecordedPart:
    """Return what all ranks have written. Raises `CheckpointError` as `load_recording`."""
    with kept(folder):
        head = _read_head(folder)
        data, form = folder / head["data"], _form_in(head["form"])
        require_whole(data, head["files"])
        for one in head["kept"]:
            saved = read_manifest(path := data / Snapshot.name_of(one["call"]))
            require_whole(path / saved.data, saved.files)
        parts = [_read_rank(data, rank) for rank in range(form.world_size)]
    rows = [tensors for _, tensors in parts]
    return RecordedPart(
        form=form,
        kept=tuple(
            Snapshot(
                call=one["call"],
                updates=one["updates"],
                held=data / Snapshot.name_of(one["call"]),
                places=_rows(rows, f"state/{one['call']}"),
            )
            for one in head["kept"]
        ),
        calls=tuple(_call(parts, place) for place in range(len(parts[0][0]["calls"]))),
        updates=head["updates"],
        last=_rows(rows, "last"),
    )


# The head.


def _head_of(recording: RecordedPart) -> dict[str, Any]:
    form = recording.form
    return {
        "form": {
            "stage": form.stage,
            "world_size": form.world_size,
            "shards": form.shards,
            "driver": form.driver,
            "apart": form.apart,
            "leaves": [[leaf.name, leaf.placement.value] for leaf in form.leaves],
        },
        "updates": recording.updates,
        "kept": [{"call": one.call, "updates": one.updates} for one in recording.kept],
    }


def _read_head(folder: Path) -> dict[str, Any]:
    """Return recording.json. Raises `CheckpointError` unless `write_folder` has written it."""
    file = folder / HEAD
    try:
        head = read_sealed(file, _KEY)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no recording at {folder}: no {HEAD} in it.",
            cause="a mistyped path, or a first save that was cut off.",
            fix="pass the folder of recording.save(folder).",
        ) from None
    if head.pop("format", None) != _FORMAT:
        raise CheckpointError(
            f"the recording at {folder} has another format than {_FORMAT}.",
            cause="it was written by another version of fzero.",
            fix="load it with the version that wrote it, or record the run again.",
        )
    return head


def _form_in(form: Mapping[str, Any]) -> RecordedForm:
    leaves = tuple(DigestedLeaf(name, Placement(value)) for name, value in form["leaves"])
    return RecordedForm(**{**form, "leaves": leaves})


def _require_elsewhere(recording: RecordedPart, folder: Path) -> None:
    """Raise `LayoutError` if states are read from where a save would remove them."""
    where = [one.held.parent.parent for one in recording.kept if isinstance(one.held, Path)]
    if any(one.resolve() == folder.resolve() for one in where):
        raise LayoutError(
            f"recording.save: this recording was loaded from {folder}.",
            cause="a save in the place of itself, which would remove the states that it reads.",
            fix="save it to another folder.",
        )


def _named(folder: Path) -> str:
    return _read_head(folder)["data"] if (folder / HEAD).exists() else ""


_RECORDING = Kind(HEAD, "calls", _named)


# The part of one rank.


def _part_of(recording: RecordedPart, place: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the texts and the tensors of a rank."""
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
                "inputs": encoded(call.inputs[place], f"{name}/inputs", tensors),
            }
        )
    if recording.last is not None:
        tensors["last"] = recording.last[place]
    for one in recording.kept:
        if one.places is not None:
            tensors[f"state/{one.call}"] = one.places[place]
    return {"calls": calls, "generators": list(texts)}, tensors


def _files_of(data: Path, rank: int) -> tuple[Path, Path]:
    return data / f"rank-{rank:05d}.json", data / f"rank-{rank:05d}.safetensors"


def _write_rank(
    data: Path, rank: int, texts: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, list[int]]:
    """Write the part of a rank; return the digests of its files, by name."""
    files = _files_of(data, rank)
    files[0].write_text(json.dumps(texts))
    flat = {name: x.contiguous() for name, x in tensors.items()}
    forms = {name: TensorForm(tuple(x.shape), x.dtype) for name, x in flat.items()}
    places = begin_file(files[1], forms)
    for name, x in flat.items():
        write_values(places[name], x)
    sync_files(files)
    return {file.name: digest_of_file(file) for file in files}


def _read_rank(data: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the texts and the tensors of a rank."""
    texts, tensors = _files_of(data, rank)
    values = {name: read_values(place) for name, place in read_file(tensors).items()}
    return json.loads(read_text(texts)), values


def _call(parts: Sequence[tuple[dict[str, Any], dict[str, Tensor]]], place: int) -> RecordedCall:
    """Return a call of all ranks."""
    calls = [texts["calls"][place] for texts, _ in parts]
    number = calls[0]["number"]
    pairs = [(call, *part) for call, part in zip(calls, parts, strict=True)]
    return RecordedCall(
        number=number,
        updates=calls[0]["updates"],
        inputs=tuple(decoded(call["inputs"], tensors.__getitem__) for call, _, tensors in pairs),
        devices=(),
        generators=tuple(texts["generators"][call["generators"]] for call, texts, _ in pairs),
        words=_rows([tensors for _, tensors in parts], f"{number}/words"),
    )


def _rows(ranks: Sequence[Mapping[str, Tensor]], name: str) -> Tensor | None:
    """Return what all ranks have of one name as rows; None where they have none."""
    held = [tensors[name] for tensors in ranks if name in tensors]
    return torch.stack(held) if held else None
