"""What a checkpoint says about itself, as JSON; whether it fits a state. Pure but for one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint._counters import COUNT, STEP, UNSTEPPED, counters_of, unstepped_of
from fzero.checkpoint._form import MANIFEST_FORM, problems
from fzero.checkpoint._owned import owned_slots
from fzero.checkpoint._pieces import TensorPiece, leaf_names
from fzero.checkpoint._sealed import put_sealed, read_sealed
from fzero.checkpoint._slots import slots_of
from fzero.checkpoint.everywhere import CheckpointError, damaged
from fzero.errors import LayoutError
from fzero.state import TrainState
from fzero.state.scale import as_numbers

MANIFEST, FORMAT = "checkpoint.json", 3
LEFT_OUT = ", left out"  # what a manifest says at the end of a frozen leaf that was not saved
_SHOWN = 8  # differences that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Facts of a saved state, all of them JSON; `_form` says what each can be."""

    origin: dict[str, Any]  # where it came from: stage, ranks, ...; only `optimizer` must fit
    leaves: dict[str, str]  # parameter path: shape, dtype, trainable or frozen (or LEFT_OUT)
    slots: dict[str, dict[str, str]]  # optimizer slot: {parameter path: dtype}
    counters: dict[str, Any]  # `step`, those of the `optimizer` and of the loss `scale`
    module: dict[str, Any]  # of an engine: its module's buffers, its optimizer's options
    tensors: dict[str, Any] = field(default_factory=dict)  # where each is; see `_storage`
    data: str = ""  # name of the folder with the tensors
    files: dict[str, list[int]] = field(default_factory=dict)  # in it: [bytes, crc32]
    extra: dict[str, Any] = field(default_factory=dict)  # the user's


def facts_of_state(state: TrainState, *, frozen: bool = True) -> Manifest:
    """Return the facts of a state, the same for every stage and number of ranks but `origin`.

    frozen: whether frozen parameters are saved.
    """
    unlearned = "frozen" if frozen else "frozen" + LEFT_OUT
    setup, layout = state.setup, state.setup.layout
    names, unstepped = leaf_names(layout), unstepped_of(state)
    slots: dict[str, dict[str, str]] = {}
    for slot, group, flat in slots_of(state):
        held = [names[i] for i in layout.groups[group].leaves if layout.leaves[i].numel]
        slots.setdefault(slot, {}).update(dict.fromkeys(held, str(flat.dtype)))
    for slot, forms in owned_slots(state).items():
        slots.setdefault(slot, {}).update(forms)
    return Manifest(
        origin={
            "stage": setup.stage,
            "ranks": state.mesh.size,
            "torch": torch.__version__,
            "optimizer": setup.optimizer.saved_names(state.optimizer, layout.leaves).rule,
        },
        leaves={
            name: f"{leaf.shape} {leaf.dtype} {'trainable' if leaf.trainable else unlearned}"
            for name, leaf in zip(names, layout.leaves, strict=True)
        },
        slots=slots,
        counters={
            "step": int(state.step),
            "optimizer": counters_of(state),
            "scale": as_numbers(state.scale),
            **({UNSTEPPED: unstepped} if unstepped else {}),
        },
        module={"buffers": {}, "options": []},
    )


def leaves_out(saved: Manifest) -> bool:
    """Whether frozen parameters were not saved."""
    return any(text.endswith(LEFT_OUT) for text in saved.leaves.values())


def require_fit(saved: Manifest, wanted: Manifest, path: object) -> None:
    """Raise `LayoutError`, naming every difference, if `saved` is not what `wanted` describes."""
    theirs = {name: text.removesuffix(LEFT_OUT) for name, text in saved.leaves.items()}
    different = list(_differences(theirs, wanted.leaves))
    if different:
        raise LayoutError(
            f"load: the parameters in {path} are not those of this state:{_listed(different)}",
            cause="another model, dtype, or choice of what is trainable.",
            fix="make the state from the model that was saved. Nothing was changed.",
        )
    theirs, ours = saved.origin["optimizer"], wanted.origin["optimizer"]
    different = [] if theirs == ours else [f"the rule: {theirs} in the checkpoint, {ours} here"]
    for slot in sorted({*saved.slots, *wanted.slots}):
        inside = _differences(_known(saved.slots.get(slot, {})), wanted.slots.get(slot, {}))
        different += [f"slot {slot} of {line}" for line in inside]
    different += [f"counter {line}" for line in _counted_differently(saved, wanted)]
    if different:
        raise LayoutError(
            f"load: the optimizer state in {path} is not that of this state's optimizer:"
            f"{_listed(different)}",
            cause="the state was made with another optimizer than the saved one.",
            fix=f"make the state with the optimizer that was saved ({theirs}, with the same "
            "momentum and master_weights). To go on with another one, load so, and then "
            "fzero.init(fzero.full_params(loaded), other, stage=...). Nothing was changed.",
        )


def _known(slot: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a slot with their elements: one of another shape is made by a step."""
    return {name: form for name, form in slot.items() if " " not in form}


def _counted_differently(saved: Manifest, wanted: Manifest) -> Iterator[str]:
    """Say which counters one has and the other has not.

    But for a step: without one, each leaf took every update.
    """
    theirs, ours = (one.counters["optimizer"] for one in (saved, wanted))
    implied = COUNT in theirs and COUNT in ours
    named = [
        {f"optimizer/{name}": "a number" for name in one if not (implied and name == STEP)}
        for one in (theirs, ours)
    ]
    yield from _differences(*named)
    for name, count in theirs.items():
        if isinstance(count, dict) and name in ours:
            own = ours[name]
            learning = own if isinstance(own, dict) else _stepped(wanted)
            for leaf in learning:
                if leaf not in count:
                    yield f"optimizer/{name} of {leaf}: nothing in the checkpoint"


def _stepped(wanted: Manifest) -> set[str]:
    """Return the leaves for which an optimizer keeps something."""
    return {leaf for slot in wanted.slots.values() for leaf in slot}


def as_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON gives it back. Raises `LayoutError` if JSON cannot hold it."""
    try:
        text = json.dumps(dict(extra or {}))
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"save: extra={extra!r:.200} cannot be written as JSON: {error}.",
            cause="a tensor, an array or another object in it.",
            fix="give a dict of numbers, strings, lists and dicts; x.tolist() of a tensor.",
        ) from error
    return json.loads(text)


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Put the manifest in place in one move: from then on the checkpoint is the new one.

    It is written into its own data folder first, where no other writer writes.
    """
    body = {"format": FORMAT, **asdict(manifest)}
    put_sealed(path / MANIFEST, "checkpoint", body, through=path / manifest.data / MANIFEST)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`. Raises `CheckpointError` if there is no good one."""
    file = path / MANIFEST
    try:
        body = read_sealed(file, "checkpoint")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint at {path}: no {MANIFEST} in it.",
            cause="a mistyped path, a save that was cut off before it was complete, or a "
            "checkpoint of another library.",
            fix="pass the path that was given to fzero.checkpoint.save. DeepSpeed's: convert it by "
            "its ds_to_universal, and use fzero.checkpoint.load_universal. Safetensors: "
            "import_safetensors. Others: docs/checkpoints.md.",
        ) from None
    if body.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"the checkpoint at {path} has another format than {FORMAT}.",
            cause="it was written by another version of fzero.",
            fix="load it with the version that wrote it, or update fzero.",
        )
    for wrong in problems(body, MANIFEST_FORM, "the manifest"):
        raise damaged(file, f"is no manifest: {wrong}")
    return Manifest(**body)


def misfits(saved: Manifest, piece: TensorPiece) -> Iterator[str]:
    """Say what is wrong with the tensor of a piece in the manifest."""
    if piece.name not in saved.tensors:
        yield "the manifest does not have it"
        return
    entry, end = saved.tensors[piece.name], 0
    if entry["dtype"] != str(piece.values.dtype):
        yield f"it is {entry['dtype']:.80} there, {piece.values.dtype} is wanted"
    for begin, numel, file, offset, length in sorted(entry["chunks"]):
        if begin != end:
            yield f"elements {end} to {begin} are in no chunk, or in two"
        if file not in saved.files:
            yield f"it is in {file!r:.200}, which is not in the manifest"
        elif offset + length > saved.files[file][0]:
            yield f"it is at {offset} + {length} of {file}"
        end = begin + numel
    if end != piece.numel:
        yield f"{end} elements are there, {piece.numel} are wanted"


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        if saved.get(name) != wanted.get(name):
            here, there = wanted.get(name, "nothing"), saved.get(name, "nothing")
            yield f"{name}: {there} in the checkpoint, {here} in the state"


def _listed(lines: list[str]) -> str:
    rest = len(lines) - _SHOWN
    shown = [*lines[:_SHOWN], *([f"... and {rest} more"] if rest > 0 else [])]
    return "".join(f"\n  {line}" for line in shown)
