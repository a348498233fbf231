"""`save` and `save_async`: a train state, or an engine, to a path.

draft_of      while training is paused: everything is checked, and what each process writes is
collected
write_draft   a new folder, files with tensors in it, and last the manifest, which names it
AsyncSave     a save in flight: a thread that writes while the training goes on
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint import engine_state, folders, manifest
from fzero.checkpoint._mesh_coordinates import save_in_places
from fzero.checkpoint._pieces import TensorPiece, pieces_of_rank
from fzero.checkpoint._process_states import (
    LocalStates,
    facts_of_replicas,
    local_states,
    require_idle,
    texts_of_ranks,
)
from fzero.checkpoint._storage import write_pieces
from fzero.checkpoint.collective import Ranks, from_first, on_all_ranks, results_of_ranks
from fzero.checkpoint.engine_state import RNG, Buffers, EngineLike
from fzero.checkpoint.folders import PathLike
from fzero.checkpoint.manifest import Manifest
from fzero.collectives import assert_same_everywhere
from fzero.errors import AxisError, CheckpointError, LayoutError, explain
from fzero.errors.json_form import problems
from fzero.ranks.mesh import Axis, Runtime, own_group
from fzero.state import Placement, TrainState
from fzero.transforms.state_entries import entries_of, trains_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Everything that one process writes, collected while training is paused."""

    ranks: Ranks
    manifest: Manifest
    pieces: list[TensorPiece]
    buffers: Buffers  # of an engine's module
    rng: str  # the random generators of this process; empty: they are not saved
    groups: list[list[str]]  # of an engine: what is in each of its optimizer's param groups

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        tensors = [*(piece.values for piece in self.pieces), *self.buffers.values()]
        return sum(x.nbytes for x in tensors)


def save(
    path: PathLike,
    state: TrainState | EngineLike,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    frozen: bool = True,
) -> None:
    """Write a train state, or an engine with its module's buffers, to the folder `path`.

    A collective. Each parameter becomes one 1-D tensor without padding, under its own path, as does
    what the optimizer keeps for it; so `load` needs neither the same number of ranks nor the same
    stage. Every rank writes P / W elements, also of replicated buffers; all must see one file
    system. Also written: the step, the optimizer's counters, the loss scale, each rank's random
    generators (torch on CPU and CUDA, python, numpy); of an engine also the persistent buffers of
    its module, each rank's own where they differ, and the options of its optimizer's param groups
    (which a scheduler changes).

    A checkpoint that is at `path` already counts until the new one is complete: each save writes
    into a new folder, and the change is one rename of one small file. If anything fails, on any
    rank, every rank raises, the old checkpoint is still there and the state is still good. Several
    programs may save to one path at once: each time one of them is there, whole.

    With virtual ranks, save the stacked state, outside `fzero.simulate`.

    A state on a part of a mesh (`fzero.Mesh.__getitem__`) has other values at each place along the
    other axes. Each place has a folder of its own in `path`, "expert=1of4", which is a checkpoint;
    all of them are committed together. Those that an earlier save of this state on a mesh of other
    sizes has left there are removed at the end, and no others.

    Args:
        path: a folder, which is made if it is not there; other files in it stay.
        state: one state or engine, idle: no gradient is held.
        extra: what else belongs to the checkpoint and JSON can hold (tuples come back as lists,
            keys as strings): the position in the data, the rate of a scheduler. What has a
            `state_dict()` (a scheduler, a `fzero.data.Order`) comes back as that dict. Rank 0's
            counts. `load_with_extra` and `read_extra` return it.
        rng: whether the random generators are saved.
        frozen: False: parameters that do not learn are left out (of a fine-tuning that keeps its
            base elsewhere); `load` leaves those of the state that it is given as they are.

    Raises:
        PhaseError: for a state between gradient and update.
        DonatedError: for a used-up one.
        LayoutError: for an empty path, or an `extra` or an optimizer state that cannot be saved.
        AxisError: when the ranks save at different steps or paths.
        LostRankError: when a rank ended.
        CheckpointError: when the disk does not take it, within the timeout of the process group, or
            did not take an earlier `save_async`.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load, save
        >>> opt, folder = fzero.optim.adam(1e-3), tempfile.TemporaryDirectory()
        >>> save(folder.name, fzero.init({"w": torch.ones(3)}, opt, stage=3))
        >>> fzero.full_params(load(folder.name, fzero.init({"w": torch.zeros(3)}, opt, stage=0)))
        {'w': tensor([1., 1., 1.])}
        >>> folder.cleanup()
    """
    wait_for_earlier()
    if isinstance(state, TrainState) and state.mesh.mesh is not None:
        how = {"extra": extra, "rng": rng, "frozen": frozen}
        return save_in_places(path, state, lambda *one: _save(*one, **how))
    _save(path, state, extra=extra, rng=rng, frozen=frozen)


def save_async(
    path: PathLike,
    state: TrainState | EngineLike,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    frozen: bool = True,
) -> AsyncSave:
    """`save` that returns once this rank's P / W elements are copied to host memory. A collective.

    The rest is done by a thread, over a process group of its own: the training may go on, also
    with steps that overwrite the state. What is written is the state at the call.

    One is in flight at a time: a later `save`, `save_async` or `load` waits for it. So the host
    holds one copy at most.

    Args:
        path: as for `save`.
        state: as for `save`.
        extra: as for `save`.
        rng: as for `save`.
        frozen: as for `save`.

    Returns:
        A handle: `.done()` says whether it is over, `.result(timeout)` waits, and raises what went
        wrong. An error that nobody asked for is raised by the next `save` or `save_async`; at the
        end of the program it is printed, and the exit status is 1.

    Raises:
        PhaseError, DonatedError, LayoutError, AxisError: as `save`, before anything is copied.
        CheckpointError: when the disk did not take an earlier one.

    Example:
        >>> import tempfile, torch, fzero
        >>> state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = fzero.checkpoint.save_async(folder, state, extra={"epoch": 1})
        ...     saving.result()
        ...     fzero.checkpoint.read_extra(folder), saving.done()
        ({'epoch': 1}, True)
    """
    wait_for_earlier()
    held = local_states("save", state, apart=True)
    where = folders.shared_path(held.processes, "save", path)
    draft = draft_of(held, extra, rng=rng, frozen=frozen, copies=True)

    beside = Ranks(axis=group_beside(draft.ranks.axis), beside=True)
    write = lambda: write_draft(replace(draft, ranks=beside), where)  # noqa: E731
    handle = run_beside(write, what=f"save_async to {path}")
    _EARLIER[:] = [handle]
    return handle


def _save(path: PathLike, state: TrainState | EngineLike, among: str = "", **how: Any) -> None:
    """Save to one path. among: as of `write_draft`."""
    held = local_states("save", state, apart=True)
    where = folders.shared_path(held.processes, "save", path)
    write_draft(draft_of(held, **how), where, among)


def draft_of(
    held: LocalStates,
    extra: Mapping[str, Any] | None,
    *,
    rng: bool = True,
    frozen: bool = True,
    copies: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> Draft:
    """Check everything, and return what this process writes. A collective.

    copies: whether values are copied to host memory; else they are views of the state.
    ready: is called first on each rank; an error of it is raised on all.
    """
    ranks, first, doing = held.processes, held.states[0], "prepare the checkpoint"
    with on_all_ranks(ranks, what=doing):
        ready()
        for one in held.states:
            require_idle(one)
        facts = manifest.facts_of_state(first, frozen=frozen)
        if held.engine is not None:
            facts.module["options"] = engine_state.options_of(held.engine.optimizer)
        pieces = list[TensorPiece]()
        for one, rank in zip(held.states, held.ranks, strict=True):
            pieces += pieces_of_rank(one, rank, frozen=frozen)
        if copies:
            pieces = [replace(piece, values=_copied(piece.values)) for piece in pieces]
        draft = Draft(
            ranks=ranks,
            manifest=replace(facts, extra=manifest.as_extra(extra)),
            pieces=pieces,
            buffers={name: _copied(x) if copies else x for name, x in held.buffers.items()},
            rng=engine_state.rng_text() if rng else "",
            groups=[] if held.engine is None else engine_state.group_names(first),
        )
    step = f"step {draft.manifest.counters['step']}"
    own = held.ranks[0] % first.setup.axis.size
    if trains_apart(first) or Placement.OWNER in {x.placement for x in entries_of(first, own)}:
        of_replicas = facts_of_replicas(held)  # of which each skips updates of its own
        draft.manifest.origin.update(of_replicas)
        manifest.note_texts(draft.manifest, texts_of_ranks(held, what=doing))
        step = f"step {of_replicas}" if of_replicas else step
    with on_all_ranks(ranks, what=doing):
        body = {**draft.manifest.as_json(), "data": f"data-{'0' * 16}"}
        for wrong in problems(body, manifest.MANIFEST_FORM, "the manifest"):
            raise LayoutError(
                f"save: {wrong}.",
                cause="a parameter, buffer or slot with a line break in its name.",
                fix="give it another name: load would refuse this one. Nothing was written.",
            )
    assert_same_everywhere([step], ranks.axis, what="the checkpoint")
    return draft


def write_draft(draft: Draft, path: Path, among: str = "") -> None:
    """Write a draft, and commit it as the checkpoint at `path`. A collective.

    among: the name of its data folder, where it is one of several that are committed together: its
    manifest waits in there to be named.
    """
    ranks, rank = draft.ranks, draft.ranks.axis.rank
    try:
        with ExitStack() as until_written:

            def make() -> str:
                until_written.enter_context(folders.kept(path, makes=manifest.CHECKPOINT))
                return folders.make_folder(path, manifest.CHECKPOINT, among)

            data = from_first(ranks, make, what=f"make {path}")
            folder = path / data

            def begin() -> dict[str, tuple[str, int]]:
                if draft.rng:
                    (folder / RNG.format(rank)).write_text(draft.rng)
                if draft.groups and rank == 0:
                    (folder / manifest.GROUPS).write_text(json.dumps(draft.groups))
                return engine_state.facts_of(draft.buffers) if draft.buffers else {}

            facts = results_of_ranks(ranks, begin, what=f"write {path}")
            own, pieces = dict[str, dict[str, str]](), draft.pieces
            if any(facts):
                own = engine_state.differing_buffers(facts)
                pieces = [*pieces, *engine_state.buffer_pieces(draft.buffers, own, rank)]
            tensors, files = write_pieces(pieces, folder, ranks)

            def commit() -> None:
                """Put the manifest in place in one move: the checkpoint is the new one then.

                It is written into its own data folder first, where no other writer writes.
                """
                folders.require_whole(folder, files, ())  # this rank sees what others have written
                others = [file for file in sorted(folder.iterdir()) if file.name not in files]
                folders.sync_files([*others, folder])
                saved = replace(
                    draft.manifest,
                    data=data,
                    module={**draft.manifest.module, "buffers": own},
                    tensors=tensors,
                    files={**files, **{file.name: folders.digest_of_file(file) for file in others}},
                )
                body = {"format": manifest.FORMAT, **saved.as_json()}
                file = (folder if among else path) / manifest.MANIFEST
                through = (folder / manifest.MANIFEST).with_suffix(".partial")
                folders.put_sealed(file, "checkpoint", body, through=through)
                folders.sync_files([file.parent])

            doing = f"read back {folder} (do all ranks share this file system?)"
            from_first(ranks, commit, what=doing)
    finally:
        if rank == 0 and not among and os.path.isdir(path):  # False for no name
            folders.sweep(path, manifest.CHECKPOINT)


def _copied(values: Tensor) -> Tensor:
    """A copy in host memory, of the values as they are now."""
    host = torch.empty_like(values, device="cpu", memory_format=torch.contiguous_format)
    return host.copy_(values.detach())


_EARLIER: list[AsyncSave] = []
"""The last save that this process started, until somebody has got its result."""

_GROUPS: dict[tuple[Axis, str], Axis] = {}
"""For each axis, and what writes, the same ranks with a process group of its own: made once."""


class AsyncSave:
    """A save in flight. `save_async` returns one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: Future[None] = Future()
        self._asked = False
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether its thread is of this process: one that was forked meanwhile has none."""
        return self._process == os.getpid()

    def done(self) -> bool:
        """Return whether it is over, well or not. No collective, and no wait."""
        return not self.is_here or self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there, for `timeout` seconds at most.

        Raises:
            TimeoutError: if it is not over by then; it goes on.
            CheckpointError: what went wrong, on every rank; what was there before is still there.
                In a process that was forked meanwhile, always.
        """
        if not self.is_here:
            raise CheckpointError(
                f"{self._what} was begun by process {self._process}; this is {os.getpid()}.",
                cause="a process that was forked while the save was in flight: it has no thread "
                "that writes.",
                fix="ask in the process that began it, which goes on with it.",
            )
        try:
            self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(
                explain(
                    f"{self._what} is not over after {timeout} s.",
                    cause="a slow disk, or another rank that has not come to save_async.",
                    fix="wait longer; the save goes on.",
                )
            ) from None
        finally:
            self._asked = self._asked or self._future.done()

    def __repr__(self) -> str:
        if not self.is_here or not self.done():
            return f"<{self._what}: in flight{'' if self.is_here else ' elsewhere'}>"
        return f"<{self._what}: {'failed' if self._future.exception() else 'done'}>"


@atexit.register
def _say_what_failed() -> None:
    """End a program with an error, if nobody has heard that its last save failed.

    All threads are over then. Only `os._exit` sets the status of a program that ends; what was
    registered before this, by torch and Python, has nothing to do for one that fails.
    """
    for handle in _EARLIER:
        if handle.is_here and not handle._asked and (error := handle._future.exception()):
            traceback.print_exception(error)
            text = explain(
                f"{handle._what} failed, and nobody asked for its result.",
                cause="what is said above; or torch.distributed.destroy_process_group() before the "
                "save was over.",
                fix="call result() of what save_async returned before the end. What was saved "
                "before is still there.",
            )
            print(text, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def run_beside(run: Callable[[], None], *, what: str) -> AsyncSave:
    """Run in a thread, which the interpreter waits for when it ends."""
    handle = AsyncSave(what)

    def body() -> None:
        try:
            run()
        except BaseException as error:  # `result` raises it, whatever it is
            handle._future.set_exception(error)
        else:
            handle._future.set_result(None)

    threading.Thread(target=body, name=what, daemon=False).start()
    return handle


def wait_for_earlier(*, raises: bool = True) -> None:
    """Wait for a save in flight; raise its error, if nobody has asked for its result."""
    for handle in [one for one in _EARLIER if one.is_here]:
        if raises and not handle._asked:
            _EARLIER.clear()
            handle.result()
        else:
            handle._future.exception()


def group_beside(axis: Axis, *, use: str = "saves") -> Axis:
    """Return the same ranks with a group that only one use has. A collective at first.

    use: of which one thread is in flight at a time.
    """
    if axis.runtime is not Runtime.PROCESSES:
        return axis
    found = _GROUPS.get((axis, use))
    if found is not None:
        with suppress(AxisError):  # torch.distributed may have been started anew
            found.group()
            return found
    found = _GROUPS[axis, use] = own_group(axis, backend="gloo")
    return found
