"""`load`: from a path into a state of any stage on any number of ranks, or into an engine.

read the manifest, on rank 0        one collective says it to all
match leaves by name                `planned`: everything is checked, the new state allocated
read this rank's ranges of leaves   `read_pieces`: each saved chunk once, with its checksum
redistribute, finalize              `finished`: what other ranks have read, and what begins
"""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from fzero.checkpoint import engine_state, folders, manifest
from fzero.checkpoint._allocate import NewState, make_whole, read_leaves
from fzero.checkpoint._mesh_coordinates import load_in_places
from fzero.checkpoint._partial import LoadReport, Partial, Rename, partial_of, renamed, with_begun
from fzero.checkpoint._pieces import TensorPiece, overlap
from fzero.checkpoint._process_states import LocalStates, local_states, require_closed
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint._storage import read_pieces, tensor_files
from fzero.checkpoint.collective import damaged, from_first, on_all_ranks
from fzero.checkpoint.engine_state import RNG, Buffers, EngineLike
from fzero.checkpoint.folders import PathLike
from fzero.checkpoint.manifest import Manifest
from fzero.collectives import assert_same_everywhere
from fzero.errors.json_form import problems, text
from fzero.machine.named_shards import leaf_paths
from fzero.optim.counters import COUNT
from fzero.state import Placement, TrainState
from fzero.state.layout import as_complex
from fzero.transforms.donation import returned
from fzero.transforms.init import begun_anew
from fzero.transforms.state_entries import APART, entries_of, require_facts

Thing = TypeVar("Thing")


@overload
def load(
    path: PathLike,
    state: Thing,
    *,
    rng: bool = True,
    strict: Literal[True] = True,
    rename: Rename | None = None,
) -> Thing: ...
@overload
def load(
    path: PathLike,
    state: Thing,
    *,
    rng: bool = True,
    strict: Literal[False],
    rename: Rename | None = None,
) -> tuple[Thing, LoadReport]: ...
def load(
    path: PathLike,
    state: Thing,
    *,
    rng: bool = True,
    strict: bool = True,
    rename: Rename | None = None,
) -> Thing | tuple[Thing, LoadReport]:
    """Return a state with the values saved at `path`, placed as `state` is. A collective.

    `state` says what is wanted: the model, the optimizer, the stage, the ranks; its own values
    do not matter (gradients that it holds are not kept) and stay as they are. Its stage and
    number of ranks may be others than those that saved: values are equal bit for bit. Each rank
    reads the saved chunks that its own P / W elements touch, each once; the ranks then gather
    what is replicated, one group of parameters at a time.

    An engine gets the values itself, and is what comes back: parameters, optimizer, buffers of its
    module (its own on as many ranks as have saved, else those of rank 0), options of its
    optimizer's param groups where there are as many groups. It is changed when all is read.

    The random generators of this process are set to those of the same rank that saved; of a rank
    that did not save, they stay. A state with a loss scale that adapts itself goes on with the
    saved one, within the bounds of its own policy, and begins anew if none was saved; a state
    without one stays without.

    Of a state on a part of a mesh each place reads its own folder in `path`, as `save` has named
    it. On a mesh of another size along the other axes, give the path of a place: `load(folder /
    "expert=2of4", state)`, into one state for each of those that a rank shall have.

    With `strict=False` the state may be of another model: a new head, a larger vocabulary. What is
    in both, by its name, has the saved values and moments; of another shape (with as many dims)
    that part of it which is in both. The rest is as in `state`, but for the optimizer: a parameter
    that is new to it begins, with a count of 0, as does one that was frozen; its dtype, and the
    rule, are to be the same. What has a place nowhere is left out. A parameter of another shape is
    read whole, one at a time, by each rank that has a part of it. The report says what was what.

    Everything is checked before a value is read: the manifest field by field, names, shapes,
    dtypes, optimizer slots, the size and checksum of each file, the place of each tensor. Frozen
    parameters that `save(frozen=False)` has left out stay those of the state. Files
    outside of `path` are not read, and nothing that a file says is executed.

    Args:
        path: what was given to `save`.
        state: one state, or an engine; with virtual ranks a stacked state.
        rng: whether the random generators are set, if they were saved.
        strict: False: for another model, as above.
        rename: a function of the name of a parameter, or buffer, in the checkpoint: its name in the
            state, or None to leave it out. By default names are the same.

    Returns:
        The new state, without gradients, at the step that was saved; or the engine. With
        `strict=False` (that, report): the report has lists of names, `missing` in the checkpoint,
        `unexpected` in it, and `resized`.

    Raises:
        LayoutError: for another model or optimizer, naming every difference. With `strict=False`
            for other dtypes, another optimizer, and a checkpoint without one name of the state.
        CheckpointError: for a missing, damaged or foreign checkpoint, naming what is wrong.
        PhaseError: inside a coalesced step.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load, save
        >>> state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, state)
        ...     load(folder, fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=1))
        Traceback (most recent call last):
        fzero.errors.LayoutError: load: the parameters in ... are not those of this state:
          w: (3,) torch.float32 trainable in the checkpoint, (4,) torch.float32 trainable in ...
        Usual cause: another model, dtype, or choice of what is trainable.
        Fix: make the state from the model that was saved. Nothing was changed.
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, state)
        ...     larger = fzero.init({"w": torch.zeros(4)}, fzero.optim.sgd(0.1), stage=1)
        ...     larger, report = load(folder, larger, strict=False)
        >>> report.resized, fzero.full_params(larger)
        (['w'], {'w': tensor([1., 1., 1., 0.])})
    """
    made, _, report = _loaded(path, state, rng=rng, strict=strict, rename=rename)
    return made if strict else (made, report)


def load_with_extra(
    path: PathLike, state: Thing, *, rng: bool = True
) -> tuple[Thing, dict[str, Any]]:
    """Return `(load(path, state), extra)`, of one checkpoint, whoever saves to `path` meanwhile.

    Args:
        path: as for `load`.
        state: as for `load`.
        rng: as for `load`.

    Returns:
        The state or engine, and the `extra` that was given to `save`, as JSON gives it back.

    Raises:
        LayoutError, CheckpointError, PhaseError: as `load`.

    Example:
        >>> import tempfile, torch, fzero
        >>> state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.save(folder, state, extra={"samples_seen": 1024})
        ...     state, extra = fzero.checkpoint.load_with_extra(folder, state)
        >>> extra
        {'samples_seen': 1024}
    """
    return _loaded(path, state, rng=rng)[:2]


def _loaded(
    path: PathLike,
    state: Thing,
    data: str = "",
    *,
    rng: bool = True,
    strict: bool = True,
    rename: Rename | None = None,
) -> tuple[Thing, dict[str, Any], LoadReport]:
    """Load, with `extra`, and the report of a partial load.

    data: the name of its data folder, where others of its save name it.
    """
    wait_for_earlier(raises=False)
    if isinstance(state, TrainState) and state.mesh.mesh is not None:
        return _loaded_in_places(path, state, rng=rng, strict=strict, rename=rename)
    held = local_states("load", state, apart=True)
    ranks, axis = held.processes, held.processes.axis
    where = folders.shared_path(ranks, "load", path)
    with ExitStack() as until_read, torch.no_grad():

        def begin() -> Manifest:
            until_read.enter_context(folders.kept(where))
            return manifest.read_manifest(where, data)

        saved = from_first(ranks, begin, what=f"read {where}")
        folder = where / saved.data

        with on_all_ranks(ranks, what=f"read {where}"):
            numbers, tensors = RNG.format(axis.rank), tensor_files(saved)
            others = [name for name in saved.files if name not in tensors]
            mine = [*others[axis.rank :: axis.size], numbers, manifest.GROUPS]
            folders.require_whole(folder, saved.files, mine)
            named, groups = saved, _groups_in(folder, saved)
            if rename is not None or saved.tied:
                named, groups = renamed(saved, groups, rename, held.states[0])
            text = folders.read_text(folder / numbers) if rng and numbers in saved.files else None
            plan = planned(held, named, where, rng=text, groups=groups, strict=strict)
            manifest.require_tensors(named, plan.pieces, where / manifest.MANIFEST)
        if rename is not None:
            names = [f"{name} {text}" for name, text in named.leaves.items()]
            assert_same_everywhere(names, axis, what="the names of rename=")
        with on_all_ranks(ranks, what=f"read {folder}"):
            read_pieces(plan.pieces, folder, saved, (axis.rank, axis.size), named)
            if plan.partials:
                read = lambda piece: read_pieces([piece], folder, saved, None, named)  # noqa: E731
                _read_resized(held, plan, read)
        made: Any = finished(held, named, plan)
    if held.engine is None:
        returned([made])
    report = plan.partials[0].report if plan.partials else LoadReport([], [], [])
    return made, saved.extra, report


def _loaded_in_places(
    path: PathLike, state: TrainState, **how: Any
) -> tuple[Any, dict[str, Any], LoadReport]:
    found: list[tuple[dict[str, Any], LoadReport]] = []

    def load_place(where: Path, one: TrainState, data: str) -> TrainState:
        made, extra, report = _loaded(where, one, data, **how)
        found.append((extra, report))
        return made

    made = load_in_places(path, state, load_place)
    return made, *found[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What one process reads from a checkpoint and where it puts it, checked."""

    rooms: list[NewState]  # of each of its ranks
    pieces: list[TensorPiece]  # views of them, and of `buffers`
    buffers: Buffers  # of an engine's module
    options: list[dict[str, Any]]  # of an engine's param groups
    set_rng: Callable[[], None] | None
    partials: list[Partial]  # of each of its ranks, where the state is of another model


def planned(
    held: LocalStates,
    saved: Manifest,
    where: Path,
    *,
    rng: str | None,
    groups: Sequence[Sequence[str]] = (),
    strict: bool = True,
) -> LoadPlan:
    """Check a manifest against the states, and allocate what is read. Reads no tensor.

    where: it was read from. rng: the random generators of this rank; None: they stay. groups: the
    names in each param group that was saved. strict: whether the state is of the same model.
    """
    for state in held.states:
        require_closed(state)
    axis, engine = held.processes.axis, held.engine
    partials = [] if strict else _partials(held, saved, where)
    if partials:
        saved = partials[0].saved
    else:
        manifest.require_fit(saved, manifest.facts_of_state(held.states[0]), where)
    if (facts := saved.origin.get(APART)) is not None:
        require_facts(held.states[0], facts, where, "load")
    buffers, pieces, options = Buffers(), list[TensorPiece](), list[dict[str, Any]]()
    if engine is not None:
        options = engine_state.options_by_name(saved.module["options"], groups, held.states[0])
        if partials:  # a group of new parameters has its own
            known = {name for some in groups for name in some}
            pairs = zip(options, engine_state.group_names(held.states[0]), strict=True)
            options = [one if known & {*names} else {} for one, names in pairs]
        engine_state.require_options(engine.optimizer, options)
        if found := saved.module["buffers"]:
            same = saved.origin["ranks"] == axis.size
            shapes = partials[0].shapes if partials else None
            buffers, pieces = engine_state.blank_buffers(
                engine.module, found, axis.rank, same, shapes
            )
    frozen = not any(text.endswith(manifest.LEFT_OUT) for text in saved.leaves.values())
    each = zip(held.pairs, partials or [None] * len(held.ranks), strict=True)
    rooms = [
        NewState(state.without_gradients(), saved, rank, frozen=frozen, partial=partial)
        for (state, rank), partial in each
    ]
    if rooms[0].notes:
        rooms[0].warn(where, "load")
    pieces += [piece for room in rooms for piece in room.pieces]
    return LoadPlan(
        rooms=rooms,
        pieces=pieces,
        buffers=buffers,
        options=options,
        set_rng=None if rng is None else engine_state.rng_setter(rng, where),
        partials=partials,
    )


def _partials(held: LocalStates, saved: Manifest, where: Path) -> list[Partial]:
    """Return what of a checkpoint goes where in each state; nothing where all is alike."""
    state = held.states[0]
    module = None if held.engine is None else held.engine.module
    one = partial_of(saved, state, where, module)
    leaves = {name: text.removesuffix(manifest.LEFT_OUT) for name, text in saved.leaves.items()}
    if not any(one.report) and leaves == manifest.facts_of_state(state).leaves:
        return []
    begun = held.each(lambda k: begun_anew(held.states[k])) if one.fresh else held.states
    pairs = zip(held.pairs, begun, strict=True)
    return [with_begun(one, like, new, rank, where) for (like, rank), new in pairs]


def _read_resized(held: LocalStates, plan: LoadPlan, read: Callable[[TensorPiece], None]) -> None:
    """Read whole tensors of another shape, or name, one at a time: what is in both is set."""
    partial, layout = plan.partials[0], held.setup.layout
    names, tensors = leaf_paths(layout), partial.saved.tensors
    states = [room.state for room in plan.rooms]
    of_leaves = {entry.name: entry for entry in entries_of(states[0], 0) if entry.per_leaf}
    group_of = {leaf: i for i, group in enumerate(layout.groups) for leaf in group.leaves}

    def flat(name: str) -> Tensor:
        piece = _whole_piece(name, tensors[name])
        manifest.require_tensors(partial.saved, [piece], name)
        read(piece)
        return piece.values

    def values(leaf: int, name: str) -> Tensor | None:
        own, codec = layout.leaves[leaf], of_leaves[name].codecs.get(group_of[leaf])
        if (found := partial.source(of_leaves[name], names[leaf])) is None:
            return None
        here, shape = flat(found[0]), found[1] or own.shape
        if codec is not None:
            here = codec.numbers(here)[: prod(shape) * (2 if own.dtype.is_complex else 1)]
            here = as_complex(here) if own.dtype.is_complex else here
        return here.view(shape)

    cut = (Placement.PARTIAL, Placement.BY_RANK)
    read_leaves(held, states, lambda entry: entry.placement not in cut, values)
    every = (x for s, r in zip(states, held.ranks, strict=True) for x in entries_of(s, r))
    for entry in every:
        for key in entry.owned:
            own, (name, shape) = entry.values[key], partial.source(entry, key) or ("", None)
            shape_here = layout.leaves[names.index(key)].shape if shape else ()
            if shape is not None and own.numel() == prod(shape_here):
                common = overlap(0, own.numel(), shape_here, shape)
                common.fill(own.view(-1), flat(name))
    if held.engine is not None:
        for path, own in engine_state.buffers_of(held.engine.module).items():
            there = plan.buffers.get(path, own)
            if there.shape != own.shape:
                made = plan.buffers[path] = own.cpu().clone()
                common = overlap(0, own.numel(), tuple(own.shape), tuple(there.shape))
                common.fill(made.view(-1), there.view(-1))


@torch.no_grad()
def finished(held: LocalStates, saved: Manifest, plan: LoadPlan) -> Any:
    """Return the state or engine with what was read into the pieces of a plan. A collective."""
    rooms = plan.rooms
    begins = {key for room in rooms for key in room.begins}
    make_whole(held, [room.state for room in rooms], lambda entry: entry.key not in begins)
    made = held.returned(held.each(lambda k: rooms[k].finalize()), plan.buffers)
    if held.engine is not None:
        engine_state.set_options(held.engine.optimizer, plan.options)
    if plan.set_rng is not None:
        plan.set_rng()
    return made


def read_extra(path: PathLike) -> dict[str, Any]:
    """Return the `extra` that was given to `save`. No collective; needs no state.

    Args:
        path: what was given to `save`.

    Returns:
        The dict, as JSON gives it back: tuples are lists, keys are strings.

    Raises:
        CheckpointError: if there is no good checkpoint at `path`.
        LayoutError: for an empty path.

    Example:
        >>> import tempfile, torch, fzero
        >>> state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.save(folder, state, extra={"epoch": 3})
        ...     fzero.checkpoint.read_extra(folder)
        {'epoch': 3}
    """
    where = folders.as_path("read_extra", path)
    wait_for_earlier(raises=False)
    return manifest.read_manifest(where).extra


def fill_module(path: PathLike, engine: EngineLike, rank: int, size: int) -> None:
    """Give an engine the buffers and the param-group options of a checkpoint; not its state.

    rank: whose buffers, of `size` ranks. For engines of virtual ranks, whose states are loaded as
    a stack. Raises as `load`.
    """
    where = folders.as_path("load", path)
    with folders.kept(where):
        saved = manifest.read_manifest(where)
        same = saved.origin["ranks"] == size
        groups = _groups_in(where / saved.data, saved)
        options = engine_state.options_by_name(saved.module["options"], groups, engine.state)
        engine_state.require_options(engine.optimizer, options)
        buffers, pieces = engine_state.blank_buffers(
            engine.module, saved.module["buffers"], rank, same
        )
        manifest.require_tensors(saved, pieces, where / manifest.MANIFEST)
        read_pieces(pieces, where / saved.data, saved)
    engine_state.set_buffers(engine.module, buffers)
    engine_state.set_options(engine.optimizer, options)


def read_whole(path: PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dicts of an engine's module and optimizer, as torch has them: all of both.

    No collective; needs no engine. Raises as `read_extra`.
    """
    where = folders.as_path("load", path)
    with folders.kept(where):
        saved = manifest.read_manifest(where)
        folder = where / saved.data
        pieces = [_whole_piece(name, tensor) for name, tensor in saved.tensors.items()]
        read_pieces(pieces, folder, saved)
        groups, flats = _groups_in(folder, saved), {piece.name: piece.values for piece in pieces}

    def whole(name: str, form: str) -> Tensor:
        return flats[name].view(literal_eval(form[: form.index(")") + 1]))

    forms, buffers = saved.leaves, saved.module["buffers"]
    model = {k: whole(f"params/{k}", x) for k, x in forms.items() if f"params/{k}" in flats}
    model |= {path: whole(f"buffers/0/{path}", some["0"]) for path, some in buffers.items()}
    number = {name: k for k, name in enumerate(name for names in groups for name in names)}
    state: dict[int, dict[str, Any]] = {k: {} for k in number.values()}
    for slot, paths in saved.slots.items():
        for name in paths:
            state[number[name]][slot] = whole(f"optimizer/{slot}/{name}", forms[name])
    for counter, value in saved.counters["optimizer"].items():
        for name, k in number.items() if counter != COUNT else ():
            state[k][counter] = torch.tensor(value[name] if isinstance(value, dict) else value)
    some = zip(saved.module["options"], groups, strict=True)
    found = [{**options, "params": [number[x] for x in names]} for options, names in some]
    return model, {"state": state, "param_groups": found}


def _whole_piece(name: str, saved: Mapping[str, Any]) -> TensorPiece:
    """Return room for all of a tensor of a manifest."""
    numel = sum(chunk[1] for chunk in saved["chunks"])
    dtype = getattr(torch, saved["dtype"].removeprefix("torch."))
    values = torch.empty(numel, dtype=dtype, device="cpu")
    return TensorPiece(name=name, start=0, numel=numel, values=values)


def _groups_in(folder: Path, saved: Manifest) -> list[list[str]]:
    """Return the names in each param group; none of a state, or of a version before these were."""
    if manifest.GROUPS not in saved.files:
        return []
    found = json.loads(folders.read_text(folder / manifest.GROUPS))
    for wrong in problems(found, [[text]], "the file"):
        raise damaged(folder / manifest.GROUPS, f"is not what was written: {wrong}")
    return found
