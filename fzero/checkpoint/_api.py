"""`save` and `load`: a train state to a path and back, onto any number of ranks and any stage."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint._everywhere import everywhere, first_of, gathered
from fzero.checkpoint._files import digest, require_path, require_whole, sweep
from fzero.checkpoint._held import Held, held_states, require_closed, require_idle, restack
from fzero.checkpoint._manifest import (
    COUNT,
    STEP,
    Manifest,
    as_extra,
    describe,
    read_manifest,
    require_fit,
    write_manifest,
)
from fzero.checkpoint._pieces import OwnShard, Piece, optimizer_roles, pieces_of, shards_of
from fzero.checkpoint._slots import Role, with_values
from fzero.collectives import assert_same_everywhere, gather_many
from fzero.mesh import Axis
from fzero.state import NAMESPACE, Buffers, Progress, TrainState
from fzero.state.scale import from_numbers
from fzero.state.window import CLOSED

PathLike = str | os.PathLike[str]


def _storage() -> ModuleType:
    """Import DCP only when it is needed: who never saves need not wait for it."""
    from fzero.checkpoint import _storage

    return _storage


def save(path: PathLike, state: TrainState, *, extra: Mapping[str, Any] | None = None) -> None:
    """Write parameters, optimizer state and step to the folder `path`. A collective.

    Each parameter becomes one 1-D tensor without padding, under its own path, as does what the
    optimizer keeps for it; so `load` needs neither the same number of ranks nor the same stage.
    Every rank writes P / W elements, also of replicated buffers; all must see one file system.

    A checkpoint that is at `path` already counts until the new one is complete: the change is
    one rename of one small file, and only then is the old data removed. If anything fails, on
    any rank, every rank raises, the old checkpoint is still there and the state is still good.

    Not in it: random state and the position in the data. `extra`, a dict that JSON can hold
    (tuples come back as lists, keys as strings), is; rank 0's counts. `read_extra` returns it.

    With virtual ranks, save the stacked state, outside `fzero.simulate`.

    Args:
        path: a folder, which is made if it is not there; other files in it stay.
        state: one state, idle: no gradient is held.
        extra: anything that belongs to the checkpoint and that JSON can hold.

    Raises:
        PhaseError: for a state between gradient and update.
        DonatedError: for a used-up one.
        LayoutError: for an empty path, or an `extra` or an optimizer state that cannot be saved.
        AxisError: when the ranks save at different steps or paths.
        CheckpointError: when the disk does not take it.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load, save
        >>> opt, folder = fzero.optim.adam(1e-3), tempfile.TemporaryDirectory()
        >>> save(folder.name, fzero.init({"w": torch.ones(3)}, opt, stage=3))
        >>> fzero.full_params(load(folder.name, fzero.init({"w": torch.zeros(3)}, opt, stage=0)))
        {'w': tensor([1., 1., 1.])}
        >>> folder.cleanup()
    """
    held, given, path = held_states("save", state), path, Path(path)

    def prepare() -> tuple[Manifest, list[Piece]]:
        require_path("save", given)
        for one in held.states:
            require_idle(one)
        roles = [optimizer_roles(one) for one in held.states]
        manifest = replace(describe(held.states[0], roles[0]), extra=as_extra(extra))
        return manifest, _pieces(held, _shards(held, roles))

    manifest, pieces = everywhere(held.axis, prepare, what="prepare the checkpoint")
    facts = [f"path {path}", f"step {manifest.counters['step']}"]
    assert_same_everywhere(facts, held.axis, what="the checkpoint")
    try:
        data = first_of(held.axis, lambda: _make_folder(path), what=f"make {path}")
        _storage().write(pieces, path / data, held.axis)
        _commit(held.axis, path, replace(manifest, data=data))
    finally:
        if held.axis.rank == 0 and path.is_dir():
            sweep(path)


def load(path: PathLike, state: TrainState) -> TrainState:
    """Return a state with the values saved at `path`, placed as `state` is. A collective.

    `state` says what is wanted: the model, the optimizer, the stage, the ranks; its own values
    do not matter (gradients that it holds are not kept) and stay as they are. Its stage and
    number of ranks may be others than those that saved: values are equal bit for bit. Each rank
    reads the saved chunks that its own P / W elements touch; the ranks then gather what is
    replicated. A loss scale that adapts itself goes on as it was saved, if `state` has one; without
    a saved one it begins anew.

    Everything is checked before a value is read: names, shapes, dtypes, optimizer slots, the
    size and checksum of each file. The tensors' index is a pickle of torch.distributed.checkpoint:
    load only what you trust.

    Args:
        path: what was given to `save`.
        state: one state, for its layout; with virtual ranks a stacked one.

    Returns:
        The new state, without gradients, at the step that was saved.

    Raises:
        LayoutError: for another model or optimizer, naming every difference.
        CheckpointError: for a missing or damaged checkpoint.
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
    """
    held, given, path = held_states("load", state), path, Path(path)
    axis = held.axis
    assert_same_everywhere([f"path {path}"], axis, what="the checkpoint")
    require_path("load", given)
    saved = first_of(axis, lambda: read_manifest(path), what=f"read {path}")

    def prepare() -> list[list[Role]]:
        for one in held.states:
            require_closed(one)
        roles = [optimizer_roles(one) for one in held.states]
        require_fit(saved, describe(held.states[0], roles[0]), path)
        require_whole(path / saved.data, saved.files, axis.rank, axis.size)
        return roles

    roles = everywhere(axis, prepare, what=f"read {path}")
    with torch.no_grad():
        shards = [[_blank(one) for one in some] for some in _shards(held, roles)]
        _storage().read(_pieces(held, shards), path / saved.data, axis)
        full = _whole(held, shards)
        made = [
            _filled(one, some, iter(values), saved)
            for one, some, values in zip(held.states, roles, full, strict=True)
        ]
        return restack(held, made)


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
    require_path("read_extra", path)
    return read_manifest(Path(path)).extra


def _shards(held: Held, roles: Sequence[list[Role]]) -> list[list[OwnShard]]:
    each = zip(held.states, roles, held.ranks, strict=True)
    return [shards_of(one, some, rank) for one, some, rank in each]


def _blank(shards: OwnShard) -> OwnShard:
    return shards._replace(values=torch.zeros_like(shards.values))  # what is padding stays zero


def _pieces(held: Held, shards: Sequence[list[OwnShard]]) -> list[Piece]:
    layout = held.states[0].setup.layout
    each = zip(shards, held.ranks, strict=True)
    return [piece for some, rank in each for piece in pieces_of(layout, some, rank)]


def _make_folder(path: Path) -> str:
    """Make a data folder of a new name; return the name."""
    data = f"data-{secrets.token_hex(8)}"
    (path / data).mkdir(parents=True)
    return data


def _commit(axis: Axis, path: Path, manifest: Manifest) -> None:
    """Put the manifest, with a digest of every file, in place of the old one, if there is one."""
    folder = path / manifest.data

    def listed() -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    names = first_of(axis, listed, what=f"list {folder}")
    shares = gathered(
        axis,
        lambda: {name: digest(folder / name) for name in names[axis.rank :: axis.size]},
        what=f"read back {folder} (do all ranks share this file system?)",
    )
    digests = {name: value for share in shares for name, value in share.items()}
    whole = replace(manifest, files={name: digests[name] for name in names})
    first_of(axis, lambda: write_manifest(whole, path), what=f"write {path}")


def _whole(held: Held, shards: Sequence[list[OwnShard]]) -> list[list[Tensor]]:
    """Make what is replicated whole again: shards [l] -> [W l], for each rank of this process."""
    if held.is_stack:
        columns = [
            [torch.cat([one.values for one in column])] * len(column)
            if column[0].is_part
            else [one.values for one in column]
            for column in zip(*shards, strict=True)
        ]
        return [[column[i] for column in columns] for i in range(len(shards))]
    (mine,) = shards
    gathered = iter(gather_many([one.values for one in mine if one.is_part], held.axis))
    return [[next(gathered) if one.is_part else one.values for one in mine]]


def _filled(
    state: TrainState, roles: list[Role], values: Iterator[Tensor], saved: Manifest
) -> TrainState:
    """Return an idle state like `state` with `values` (in the order of `shards_of`) in it."""
    counters = {
        name.removeprefix("optimizer/"): value
        for name, value in saved.counters.items()
        if name != "step"
    }
    counters.setdefault(STEP, counters.get(COUNT, 0))  # of an optimizer that has but the count
    params = tuple(next(values) for _ in state.params.flats)
    leaves, treespec = optree.tree_flatten(state.optimizer, namespace=NAMESPACE)
    return state.replace(
        params=Buffers(flats=params, placement=state.params.placement),
        gradients=Buffers(),
        optimizer=optree.tree_unflatten(treespec, with_values(roles, leaves, values, counters)),
        window=CLOSED,
        step=torch.tensor(saved.counters["step"], dtype=torch.int64),
        progress=Progress(),
        scale=from_numbers(state.scale, saved.scale),
    )
