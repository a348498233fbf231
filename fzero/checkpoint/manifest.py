"""What a checkpoint says about itself, as JSON: of a state, whether it fits one, in its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.checkpoint._pieces import TensorPiece, Texts, named_entries, texts_of
from fzero.checkpoint.collective import CheckpointError, damaged
from fzero.checkpoint.folders import Kind, is_there, read_sealed
from fzero.errors import LayoutError
from fzero.errors.json_form import ANYTHING, TEXTS, DictForm, integer, natural, problems, text
from fzero.machine.named_shards import leaf_paths, tied_names
from fzero.optim.counters import counter_misfits
from fzero.optim.entries import RULE, slot_facts
from fzero.state import Placement, TrainState
from fzero.state.layout import ENCODED
from fzero.transforms import state_entries

MANIFEST, FORMAT = "checkpoint.json", 4
FORMER = (3,)  # formats that are read, too: docs/checkpoints.md says what is other in them
SUMS = "sums.json"  # in the data folder: the checksum of each chunk
GROUPS = "groups.json"  # there, too, of an engine: the names in each param group
LEFT_OUT = ", left out"  # what a manifest says at the end of a frozen leaf that was not saved
_SHOWN = 8  # differences that an error lists
_CONVERTED = tuple(f"{x}, {Placement.PARTIAL.value}" for x in ("learning", "all"))
"""The forms of sums, which are made in the dtype of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Facts of a saved state, all of them JSON; `_form` says what each can be."""

    origin: dict[str, Any]  # where it came from: stage, ranks, ...; only `optimizer` must fit
    leaves: dict[str, str]  # parameter path: shape, dtype, trainable or frozen (or LEFT_OUT)
    slots: dict[str, dict[str, str]]  # optimizer slot: {parameter path: dtype}
    counters: dict[str, Any]  # `step`, and what else is counted
    module: dict[str, Any]  # of an engine: its module's buffers, its optimizer's options
    tensors: dict[str, Any] = field(default_factory=dict)  # where each is; see `_storage`
    data: str = ""  # name of the folder with the tensors
    files: dict[str, list[int]] = field(default_factory=dict)  # in it: [bytes, crc32]
    extra: dict[str, Any] = field(default_factory=dict)  # the user's
    kept: dict[str, Any] = field(default_factory=dict)  # what else is kept: its form, its dtypes
    tied: dict[str, str] = field(default_factory=dict)  # other name of a parameter: its own

    def as_json(self) -> dict[str, Any]:
        """Return its fields; without `kept` and `tied` where there is nothing."""
        maybe = ("kept", "tied")
        return {key: value for key, value in asdict(self).items() if value or key not in maybe}


def facts_of_state(state: TrainState, *, frozen: bool = True) -> Manifest:
    """Return the facts of a state, the same for every stage and number of ranks but `origin`.

    frozen: whether frozen parameters are saved.
    """
    setup, layout = state.setup, state.setup.layout
    return Manifest(
        origin={
            "stage": setup.stage,
            "ranks": state.mesh.size,
            "torch": torch.__version__,
            "optimizer": setup.optimizer.saved_names(state.optimizer, layout.leaves).rule,
            **({} if setup.logical is None else {"logical": str(setup.logical)}),
        },
        leaves={
            name: f"{leaf.says}{'' if leaf.trainable or frozen else LEFT_OUT}"
            for name, leaf in zip(leaf_paths(layout), layout.leaves, strict=True)
        },
        slots=slot_facts(state),
        counters=state_entries.numbers_of(state),
        module={"buffers": {}, "options": []},
        kept=kept_facts(state, 0) if state.slots else {},
        tied=tied_names(layout),
    )


def kept_facts(state: TrainState, rank: int, *, live: bool = False) -> dict[str, Any]:
    """Return what a manifest says of all that a state keeps beside parameters and the rule's.

    live: also of what does not live for the run.
    """
    found: dict[str, Any] = {}
    for entry in state_entries.entries_of(state, rank, live=live):
        if state_entries.is_slot(entry):  # its form: parallel to what, and whether it is a sum
            partial = entry.placement is Placement.PARTIAL
            form = entry.form.leaves + (f", {entry.placement.value}" if partial else "")
            values = texts_of(state.setup, entry)
            found[entry.name] = {"form": form, "optional": entry.form.optional, "values": values}
    return found


def named_texts(state: TrainState, rank: int) -> Texts:
    """Return what this rank alone knows of named tensors: what it owns, or its replica has."""
    apart, found = state_entries.trains_apart(state), named_entries(state, rank)
    own = rank % state.setup.axis.size
    found += [(one, "") for one in state_entries.shared_of(state, own)] if apart else []
    return {
        prefix + one.name: texts
        for one, prefix in found
        if one.form.leaves == "named" and (apart or one.placement is Placement.OWNER)
        if (texts := texts_of(state.setup, one))
    }


def note_texts(manifest: Manifest, told: Iterable[Texts]) -> None:
    """Write what ranks alone know into a manifest."""
    for name, texts in (pair for some in told for pair in some.items()):
        if RULE in name:
            slot = manifest.slots.setdefault(name.replace(RULE, "", 1), {})
            slot.update({key: text for key, text in texts.items() if key not in slot})
        else:
            facts = {"form": "named", "optional": False, "values": {}}
            manifest.kept.setdefault(name, facts)["values"].update(texts)


def leaves_out(saved: Manifest) -> bool:
    """Whether frozen parameters were not saved."""
    return any(text.endswith(LEFT_OUT) for text in saved.leaves.values())


def require_fit(saved: Manifest, wanted: Manifest, path: object) -> None:
    """Raise `LayoutError`, naming every difference, if `saved` is not what `wanted` describes."""
    theirs = {name: text.removesuffix(LEFT_OUT) for name, text in saved.leaves.items()}
    plain, plain_here = (
        {name: text.split(ENCODED)[0] for name, text in leaves.items()}
        for leaves in (theirs, wanted.leaves)
    )
    before, logical = saved.origin.get("logical"), wanted.origin.get("logical")
    other_run = before != logical and None not in (before, logical)
    rule, own = saved.origin["optimizer"], wanted.origin["optimizer"]
    of_rule = [] if rule == own else [f"the rule: {rule} in the checkpoint, {own} here"]
    for slot in sorted({*saved.slots, *wanted.slots}):
        # What a step makes, in a shape of its own, is as it was saved.
        known = {k: form for k, form in saved.slots.get(slot, {}).items() if " " not in form}
        inside = _differences(known, wanted.slots.get(slot, {}))
        of_rule += [f"slot {slot} of {line}" for line in inside]
    stepped = {leaf for slot in wanted.slots.values() for leaf in slot}
    counters, ours = (one.counters["optimizer"] for one in (saved, wanted))
    of_rule += [f"counter {line}" for line in counter_misfits(counters, ours, stepped)]
    of_kept = list[str]()
    for name, here in wanted.kept.items():
        there = saved.kept.get(name)
        if there is None or here["optional"]:
            continue
        if there["form"] != here["form"]:
            of_kept.append(f"{name}: {there['form']} in the checkpoint, {here['form']} here")
        elif here["form"] not in _CONVERTED:
            inside = _differences(there["values"], {**there["values"], **here["values"]})
            of_kept += [f"{name} {line}" for line in inside]
    for different, seen, cause, fix in (
        (
            _differences(plain, plain_here),
            f"the parameters in {path} are not those of this state",
            "another model, dtype, or choice of what is trainable.",
            "make the state from the model that was saved.",
        ),
        (
            _differences(theirs, wanted.leaves),
            f"frozen parameters in {path} are stored otherwise",
            "another codec of `frozen=`, or none.",
            "make the state with the one that was saved. To go on with another one, load so, "
            "and then fzero.init(fzero.full_params(loaded), ..., frozen=); files of "
            "export_safetensors have decoded values, and import_safetensors encodes them.",
        ),
        (
            [f"{before} in the checkpoint, {logical} in the state"] if other_run else [],
            f"{path} is of a run of {before}, and this state has {logical}",
            "another logical_ranks= or seed=: the run would go on with other bits.",
            "make the state with those of the run. To begin another one from these values, "
            "load into a state without logical_ranks=, and make a new one of "
            "fzero.full_params(loaded).",
        ),
        (
            of_rule,
            f"the optimizer state in {path} is not that of this state's optimizer",
            "the state was made with another optimizer than the saved one.",
            f"make the state with the optimizer that was saved ({rule}, with the same "
            "momentum and master_weights). To go on with another one, load so, and then "
            "fzero.init(fzero.full_params(loaded), other, stage=...).",
        ),
        (
            of_kept,
            f"what is kept in {path} has not the forms of this state",
            "a transform of the same name with other slots, shapes or dtypes.",
            "give it another name, or the slots that were saved.",
        ),
    ):
        if different:
            rest = len(different) - _SHOWN
            shown = different[:_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
            listed = "".join(f"\n  {line}" for line in shown)
            raise LayoutError(
                f"load: {seen}:{listed}", cause=cause, fix=f"{fix} Nothing was changed."
            )


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {saved.get(name, 'nothing')} in the checkpoint, "
        f"{wanted.get(name, 'nothing')} in the state"
        for name in dict.fromkeys((*wanted, *saved))
        if saved.get(name) != wanted.get(name)
    ]


def as_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON gives it back, and what has a `state_dict()` as that.

    Raises `LayoutError` if JSON cannot hold it.
    """

    def state_dict_of(value: Any) -> Any:
        if not hasattr(value, "state_dict"):
            raise TypeError(f"a {type(value).__name__} is not one of JSON's kinds")
        return value.state_dict()

    try:
        text = json.dumps(dict(extra or {}), default=state_dict_of)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"save: extra={extra!r:.200} cannot be written as JSON: {error}.",
            cause="a tensor, an array or another object in it.",
            fix="give a dict of numbers, strings, lists and dicts; x.tolist() of a tensor.",
        ) from error
    dicts: list[list[tuple[str, Any]]] = []  # each as its pairs
    found = json.loads(text, object_pairs_hook=lambda pairs: dicts.append(pairs) or dict(pairs))
    for names in ([name for name, _ in pairs] for pairs in dicts):
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(
                f"save: extra has two keys that are {twice!r} in JSON, in one dict.",
                cause="a number and its text as keys: the keys of JSON are texts.",
                fix="give keys that are texts, and other ones.",
            )
    return found


class Commit(NamedTuple):
    """What all places of a mesh have saved together: data folders of one name, one in each."""

    data: str
    places: list[str]


def commit_file(place: Path) -> Path:
    """Return the file in the folder of a place that names what its mesh has saved."""
    return place.with_name(f"checkpoint-{re.sub('=[0-9]+of[0-9]+', '', place.name)}.json")


def read_commit(place: Path) -> Commit | None:
    """Return what the places of a mesh have saved together; None where each has its own manifest.

    Raises `CheckpointError` for a damaged file.
    """
    if not is_there(file := commit_file(place)):
        return None
    body = read_sealed(file, "places")
    for wrong in problems(body, COMMIT_FORM, "the file"):
        raise damaged(file, f"is no commit: {wrong}")
    return Commit(**body)


def manifest_file(path: Path) -> Path:
    """Return where the manifest of the checkpoint at `path` is: of a place, as its mesh says."""
    commit = read_commit(path) if PLACE.fullmatch(path.name) else None
    return path / (commit.data if commit and path.name in commit.places else "") / MANIFEST


def read_manifest(path: Path, data: str = "") -> Manifest:
    """Return the manifest at `path`. Raises `CheckpointError` if there is no good one.

    data: the data folder that a commit of its mesh names, which was read; by default it is read.
    """
    file = path / data / MANIFEST
    if not data and PLACE.fullmatch(path.name):
        file = manifest_file(path)
    try:
        body = read_sealed(file, "checkpoint")
    except (FileNotFoundError, NotADirectoryError):
        if file.parent != path:
            raise damaged(
                file, f"is missing, and {commit_file(path)} names it: it is of another save"
            ) from None
        raise CheckpointError(
            f"there is no checkpoint at {path}: no {MANIFEST} in it.",
            cause="a mistyped path, a save that was cut off before it was complete, or a "
            "checkpoint of another library.",
            fix="pass the path that was given to fzero.checkpoint.save. DeepSpeed's: convert it by "
            "its ds_to_universal, and use fzero.checkpoint.load_universal. Safetensors: "
            "import_safetensors. Others: docs/checkpoints.md.",
        ) from None
    if (found := body.pop("format", None)) not in (*FORMER, FORMAT):
        raise CheckpointError(
            f"the checkpoint at {path} has another format than {(*FORMER, FORMAT)}: {found!r:.20}.",
            cause="it was written by another version of fzero.",
            fix="update fzero. Formats before 3 are read by the version that wrote them; its "
            "export_safetensors, or save_universal, writes what this one reads.",
        )
    for wrong in problems(body, MANIFEST_FORM, "the manifest"):
        raise damaged(file, f"is no manifest: {wrong}")
    return Manifest(**body)


def require_tensors(saved: Manifest, pieces: Iterable[TensorPiece], where: object) -> None:
    """Raise `CheckpointError` unless the tensors of all pieces are whole in the files of `saved`.

    where: the manifest is.
    """
    for name, piece in {piece.name: piece for piece in pieces}.items():

        def wrong(seen: str, name: str = name) -> CheckpointError:
            return damaged(where, f"does not fit {name}: {seen}")

        if name not in saved.tensors:
            raise wrong("the manifest does not have it")
        entry, end = saved.tensors[name], 0
        if entry["dtype"] != str(piece.values.dtype):
            raise wrong(f"it is {entry['dtype']:.80} there, {piece.values.dtype} is wanted")
        for begin, numel, file, offset, length in sorted(entry["chunks"]):
            if begin != end:
                raise wrong(f"elements {end} to {begin} are in no chunk, or in two")
            if file not in saved.files:
                raise wrong(f"it is in {file!r:.200}, which is not in the manifest")
            if offset + length > saved.files[file][0]:
                raise wrong(f"it is at {offset} + {length} of {file}")
            end = begin + numel
        if end != piece.numel:
            raise wrong(f"{end} elements are there, {piece.numel} are wanted")


DATA = re.compile(r"data-[0-9a-f]{16}")

PLACE = re.compile(r"[^=,]+=[0-9]+of[0-9]+(,[^=,]+=[0-9]+of[0-9]+)*")
"""The name of the folder of one place of a mesh."""


COMMIT_FORM = DictForm(must={"data": DATA, "places": [text]})
"""The body of checkpoint-<axes>.json, which says what all places of a mesh have saved together."""

_CHUNK = (natural, integer(1, 2**63), text, natural, natural)
MANIFEST_FORM = DictForm(
    must={
        "origin": DictForm(
            must={
                "stage": integer(0, 4),
                "ranks": integer(1, 2**20),  # for each of which room may be made
                "torch": text,
                "optimizer": text,
            },
            may={**state_entries.FACTS, "logical": text},
        ),
        "leaves": TEXTS,
        "slots": DictForm(others=TEXTS),
        "counters": state_entries.NUMBERS,
        "module": DictForm(
            must={
                "buffers": DictForm(others=DictForm(must={"0": text}, others=text, names="[0-9]+")),
                "options": [ANYTHING],
            }
        ),
        "tensors": DictForm(others=DictForm(must={"dtype": text, "chunks": [_CHUNK]})),
        "data": DATA,
        # No folder, not . and not ..
        "files": DictForm(
            others=(natural, integer(0, 2**32)), names="[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*"
        ),
        "extra": ANYTHING,
    },
    may={
        "tied": TEXTS,
        "kept": DictForm(others=DictForm(must={"form": text, "optional": bool, "values": TEXTS})),
    },
)
"""The body of checkpoint.json, without its format."""


def _data_named_at(path: Path) -> str:
    """Return the data folder that counts at a path; "" where there is none yet."""
    file = manifest_file(path) if PLACE.fullmatch(path.name) else path / MANIFEST
    if not is_there(file):
        return ""
    data: Any = read_sealed(file, "checkpoint").get("data")
    for wrong in problems(data, DATA, "its data folder"):
        raise damaged(file, f"is no manifest: {wrong}")
    return data


CHECKPOINT = Kind(MANIFEST, "data", _data_named_at)
