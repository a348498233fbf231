"""What a flight recorder holds, in memory and in a folder.

recording.json          names the folder that counts, with size and checksum of each of its files
calls-<random>/         another one for each save
    state-<call>/       a checkpoint of `save`, which has checksums of its own
    ranks-<first>.pt    of the ranks of a process: each call's inputs, random states and digests, in
                        plain containers, as torch.save writes them: nothing else is loaded
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint import collective, folders
from fzero.checkpoint.elements import Draft, write_draft
from fzero.checkpoint.engine_state import rng_text
from fzero.checkpoint.manifest import MANIFEST, read_manifest
from fzero.checkpoint.mirror import REPLAY, new_folder, remove_folder
from fzero.errors import LayoutError
from fzero.errors.json_form import DictForm, natural, problems
from fzero.ranks.mesh import Axis
from fzero.state import Placement, TrainState
from fzero.tools.record.digests import DigestedLeaf, digested_leaves
from fzero.tools.trees import tensors_in
from fzero.transforms.state_entries import Pattern, trains_apart

HEAD, _KEY, _FORMAT = "recording.json", "recording", 3

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a step on one rank, after the state or the engine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A state before a call, which any number of ranks loads at any stage."""

    call: int
    updates: int
    held: Draft | Path | None  # copies in host memory, or the folder of a checkpoint
    places: Tensor | None  # [R, n]: its second digests

    @property
    def name(self) -> str:
        """Of its folder in a recording that is saved."""
        return f"state-{self.call:08d}"

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds in host memory."""
        return self.held.nbytes if isinstance(self.held, Draft) else 0

    @contextmanager
    def as_checkpoint(self) -> Iterator[Path]:
        """The folder of a checkpoint of it, inside of the block. A collective of those who keep it.

        Copies are written to the memory of the host, /dev/shm. A program that is killed meanwhile
        leaves them to the next one of its user, which sweeps them.
        """
        if isinstance(self.held, Path):
            yield self.held
            return
        assert self.held is not None  # but in a file
        ranks = self.held.ranks
        folder = collective.from_first(ranks, lambda: new_folder(REPLAY), what="make a folder")
        try:
            write_draft(self.held, folder / self.name)
            yield folder / self.name
        finally:
            if ranks.axis.rank == 0:
                remove_folder(folder)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call of a step, on the ranks that a recording has."""

    number: int
    updates: int  # of the state before it
    inputs: tuple[Inputs, ...]  # of each rank, in host memory
    devices: tuple[torch.device, ...] = ()  # where their tensors were
    generators: tuple[Any, ...]  # of each rank: its random states, as given or as a text
    words: Tensor | None  # [R, n]: digests of the state before it

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs and digests."""
        return sum(x.nbytes for x in tensors_in((self.inputs, self.words)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedForm:
    """What the state of a recording is, the same in all of its calls."""

    stage: int
    world_size: int
    shards: int  # ranks of a replica
    leaves: tuple[DigestedLeaf, ...]
    driver: str  # "step" or "engine"
    apart: bool = False  # local updates: replicas have parameters of their own

    @property
    def names(self) -> list[str]:
        """What has a digest, in order."""
        return [leaf.name for leaf in self.leaves]


def form_of(state: TrainState, driver: str) -> RecordedForm:
    """Return the form of the state of a rank."""
    return RecordedForm(
        stage=state.setup.stage,
        world_size=state.mesh.size,
        shards=state.setup.layout.ranks,
        leaves=digested_leaves(state),
        driver=driver,
        apart=trains_apart(state),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """A part of a run: what `fzero.replay` and `fzero.bisect` take.

    Attributes:
        form: stage, ranks and leaves of its state.
        ranks: those whose part it has: one of a process, or all.
        kept: states, the oldest first; calls before the first one are not held.
        calls: without a gap, the oldest first.
        updates: that the state had made after the last call.
        last: [R, n] digests of the state after the last call.
        step_fn: what was recorded; None of a recording that was loaded.
        origin: of its state, setup and local updates; None of a recording that was loaded.
        processes: of the run; None of a recording that was loaded.
    """

    form: RecordedForm
    ranks: tuple[int, ...]
    kept: tuple[Snapshot, ...]
    calls: tuple[RecordedCall, ...]
    updates: int
    last: Tensor | None
    step_fn: Callable[..., Any] | None = None
    origin: Pattern | None = None
    processes: collective.Ranks | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory: of the states that are kept there, the inputs and the digests."""
        return sum(one.nbytes for one in (*self.kept, *self.calls))

    def call_of(self, update: int) -> int:
        """Return the place in `calls` of the call that made an update, which counts from 1.

        Raises `LayoutError` for an update that is not recorded.
        """
        ends = [*(call.updates for call in self.calls[1:]), self.updates]
        for place, (call, end) in enumerate(zip(self.calls, ends, strict=True)):
            if call.updates < update <= end:
                return place
        raise LayoutError(
            f"update {update} is not recorded: {self!r}.",
            cause="an update from before the oldest state that was kept, or a call that made none.",
            fix="choose a recorded one; record with keep=None to keep them all.",
        )

    def rows_after(self, place: int) -> Tensor | None:
        """Return the digests [R, n] of each rank's part after a call; None where none are.

        So it is before a call that raised: what it has changed of an engine is not known.
        """
        if place + 1 == len(self.calls):
            return self.last
        after = self.calls[place + 1]
        return after.words if after.number == self.calls[place].number + 1 else None

    def state_before(self, number: int) -> Snapshot | None:
        """Return the state that was kept before a call, if it was."""
        return next((one for one in self.kept if one.call == number), None)

    def save(self, folder: str | Path) -> None:
        """Write it to a folder, for `fzero.load_recording`. A collective of the ranks of the run.

        A recording that is there already counts until this one is whole; then it is removed.

        Raises `LayoutError` for inputs that are no tensors, numbers, texts, or tuples, lists and
        dicts of them, and for a recording that was loaded from there; `CheckpointError` if the disk
        does not take it.
        """
        path, ranks = Path(folder), self.processes or collective.Ranks(axis=Axis(size=1))
        what, first = f"write {path}", ranks.axis.rank == 0
        part = collective.run_on_all_ranks(ranks, lambda: self._plain_part(path), what=what)
        try:
            with ExitStack() as until_written:

                def make() -> str:
                    until_written.enter_context(folders.kept(path, makes=_RECORDING))
                    return folders.make_folder(path, _RECORDING)

                name = collective.from_first(ranks, make, what=what)
                data = path / name

                def write() -> dict[str, list[int]]:
                    file = data / f"ranks-{self.ranks[0]:05d}.pt"
                    torch.save(part, file)
                    for one in self.kept if first else ():
                        if isinstance(one.held, Path):
                            ignored = shutil.ignore_patterns(folders.LOCK)
                            shutil.copytree(one.held, data / one.name, ignore=ignored)
                            folders.sync_files(
                                [x for x in (data / one.name).rglob("*") if x.is_file()]
                            )
                    folders.sync_files([file])
                    return {file.name: folders.digest_of_file(file)}

                told = collective.results_of_ranks(ranks, write, what=what)
                for one in self.kept:
                    if isinstance(one.held, Draft):
                        write_draft(one.held, data / one.name)

                def commit() -> None:
                    heads = [f"{one.name}/{MANIFEST}" for one in self.kept]
                    files = {head: folders.digest_of_file(data / head) for head in heads}
                    for some in told:
                        files |= some
                    folders.sync(data)
                    body = {"format": _FORMAT, "data": name, "files": files}
                    folders.put_sealed(path / HEAD, _KEY, body, through=data / HEAD)
                    folders.sync(path)

                collective.from_first(ranks, commit, what=what)
        finally:
            if first and path.is_dir():
                folders.sweep(path, _RECORDING)

    def _plain_part(self, folder: Path) -> Recording:
        """Return what a process has, as `torch.load` takes it. Raises `LayoutError` as `save`."""
        where = [one.held.parent.parent for one in self.kept if isinstance(one.held, Path)]
        if any(one.resolve() == folder.resolve() for one in where):
            raise LayoutError(
                f"recording.save: this recording was loaded from {folder}.",
                cause="a save in the place of itself, which would remove the states that it reads.",
                fix="save it to another folder.",
            )
        texts = dict[str, str]()  # each text once: pickle knows it again

        def plain(call: RecordedCall) -> RecordedCall:
            found = (x if isinstance(x, str) else rng_text(x) for x in call.generators)
            return replace(
                call,
                inputs=_plain(call.inputs, f"{call.number}/inputs"),
                devices=(),
                generators=tuple(texts.setdefault(text, text) for text in found),
            )

        return replace(
            self,
            kept=tuple(replace(one, held=None) for one in self.kept),
            calls=tuple(map(plain, self.calls)),
            step_fn=None,
            origin=None,
            processes=None,
        )

    def __repr__(self) -> str:
        form, held = self.form, "nothing"
        if self.calls:
            held = f"updates {self.calls[0].updates + 1} to {self.updates}"
        ranks = "all ranks" if len(self.ranks) == form.world_size else f"rank {self.ranks[0]}"
        return (
            f"Recording({held} of a {form.driver} at stage {form.stage}, {ranks} of "
            f"{form.world_size}, {len(self.kept)} states, {self.nbytes:,} bytes)"
        )


def _plain(x: Any, name: str) -> Any:
    """Return inputs without classes of anybody. Raises `LayoutError` for another object.

    name: of the part of them that this is, for an error.
    """
    if x is None or isinstance(x, Tensor):
        return x
    for kind in (bool, int, float, str):
        if isinstance(x, kind):
            return kind(x)
    if type(x) in (tuple, list):
        return type(x)(_plain(one, f"{name}.{i}") for i, one in enumerate(x))
    if type(x) is dict and all(isinstance(key, str) for key in x):
        return {key: _plain(one, f"{name}.{key}") for key, one in x.items()}
    raise LayoutError(
        f"recording.save: an input is a {type(x).__name__} ({name}).",
        cause="an object of a class of your own among the inputs of a step.",
        fix="give the step tensors, numbers, texts, and tuples, lists and dicts of them; a "
        "recording that is not saved holds any object.",
    )


def require_all_ranks(recording: Recording, what: str) -> None:
    """Raise `LayoutError` for a recording of one process of several."""
    if len(recording.ranks) != recording.form.world_size:
        raise LayoutError(
            f"{what} needs all ranks; this is {recording!r}.",
            cause="a recording of one process of a run on several.",
            fix="recording.save(folder) on every rank, and fzero.load_recording(folder).",
        )


def load_recording(folder: str | Path) -> Recording:
    """Return what `recording.save(folder)` wrote on all ranks. No collective; runs no pickle.

    Args:
        folder: that was given to `save`, with the parts of all ranks.

    Returns:
        A recording of all ranks, without functions: `replay` is then given the step, and `init` or
        `engine`.

    Raises:
        CheckpointError: for a folder without a recording, for one of another version, and for one
            that is not as it was saved: a file or a field that is missing, changed or another's.

    Example:
        >>> import tempfile, torch, fzero
        >>> step = fzero.record(fzero.shard(lambda s, x: (s, x), stage=0), every=1)
        >>> state, _ = step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5)), 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step.recording.save(folder)
        ...     fzero.load_recording(folder).calls[0].inputs
        (((3,), {}),)
    """
    path = Path(folder)
    with folders.kept(path):
        head = _read_head(path)
        data, files = path / head["data"], head["files"]
        folders.require_whole(data, files)
        states = {name: data / name.partition("/")[0] for name in files if "/" in name}
        for place in states.values():
            saved = read_manifest(place)
            folders.require_whole(place / saved.data, saved.files)
        with torch.serialization.safe_globals(_RECORDS):  # and nothing else
            parts = [_read_part(data / name) for name in sorted(files.keys() - states.keys())]
    kept_by = zip(*(part.kept for part in parts), strict=True)
    made_by = zip(*(part.calls for part in parts), strict=True)
    return replace(
        parts[0],
        ranks=tuple(range(parts[0].form.world_size)),
        kept=tuple(
            replace(some[0], held=data / some[0].name, places=_rows([x.places for x in some]))
            for some in kept_by
        ),
        calls=tuple(
            replace(
                some[0],
                inputs=tuple(x for call in some for x in call.inputs),
                generators=tuple(x for call in some for x in call.generators),
                words=_rows([call.words for call in some]),
            )
            for some in made_by
        ),
        last=_rows([part.last for part in parts]),
    )


def _read_part(file: Path) -> Recording:
    try:
        part = torch.load(io.BytesIO(file.read_bytes()), weights_only=True)
    except Exception as error:  # of another program: anything can be wrong with it
        raise collective.damaged(file, f"has something else than records: {error!s:.200}") from None
    if not isinstance(part, Recording):
        raise collective.damaged(file, f"has a {type(part).__name__}")
    return part


_RECORDS: list[Any] = [Recording, RecordedForm, DigestedLeaf, Placement, Snapshot, RecordedCall]


def _rows(of_processes: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all ranks; None where a process has none."""
    held = [rows for rows in of_processes if rows is not None]
    return torch.cat(held) if held else None


def _read_head(folder: Path) -> dict[str, Any]:
    """Return recording.json. Raises `CheckpointError` unless `Recording.save` has written it."""
    try:
        head = folders.read_sealed(folder / HEAD, _KEY)
    except (FileNotFoundError, NotADirectoryError):
        raise collective.CheckpointError(
            f"there is no recording at {folder}: no {HEAD} in it.",
            cause="a mistyped path, or a first save that was cut off.",
            fix="pass the folder of recording.save(folder).",
        ) from None
    if (found := head.get("format")) != _FORMAT:
        raise collective.CheckpointError(
            f"the recording at {folder} has format {found!r:.20}, another format than {_FORMAT}.",
            cause="it was written by another version of fzero.",
            fix="load it with the version that wrote it, or record the run again.",
        )
    for wrong in problems(head, _HEAD_FORM, "the file"):
        raise collective.damaged(folder / HEAD, f"is no recording: {wrong}")
    return head


_HEAD_FORM = DictForm(
    must={
        "format": natural,
        "data": lambda x: isinstance(x, str) and re.fullmatch("calls-[0-9a-f]{16}", x) is not None,
        "files": DictForm(others=(natural, natural), names=r"ranks-\d+\.pt|state-\d+/[\w.]+"),
    }
)


def _named(folder: Path) -> str:
    return _read_head(folder)["data"] if (folder / HEAD).exists() else ""


_RECORDING = folders.Kind(HEAD, "calls", _named)
