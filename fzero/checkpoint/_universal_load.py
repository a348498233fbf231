"""`load_universal`: DeepSpeed's universal checkpoint into a state, or an engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.checkpoint._behind import wait_for_earlier
from fzero.checkpoint._complete import are_alike, begun_slots, make_whole, read_leaves, with_room
from fzero.checkpoint._folders import PathLike, path_everywhere
from fzero.checkpoint._held import Held, held_by, require_closed
from fzero.checkpoint._pickles import require_own, require_sound
from fzero.checkpoint._universal import (
    FP32,
    OPTIMIZER,
    STATES,
    STEP,
    ZERO,
    Folder,
    is_name,
    latest,
    require_places,
)
from fzero.checkpoint._universal_shared import names_in, shared_of
from fzero.checkpoint.driven import set_options
from fzero.checkpoint.everywhere import Ranks, damaged, everywhere, from_first
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError, explain
from fzero.machine.by_path import all_paths
from fzero.optim.entries import RULE, slots_of
from fzero.state import TrainState
from fzero.state.entry import Entry
from fzero.transforms.kept import VALUES, has_values, numbered

Thing = TypeVar("Thing")


def load_universal(
    folder: PathLike, state: Thing, *, tag: str | None = None, optimizer: bool = True
) -> Thing:
    """Return a state with the values of DeepSpeed's universal checkpoint. A collective.

    `state` says what is wanted, as for `load`; its stage and number of ranks may be any. Masters
    take the fp32 values, and parameters those, rounded to their dtype. What the optimizer keeps is
    taken by torch.optim's names; what it does not keep is left out. Each parameter goes on from the
    number of steps that it took; the most of them becomes the state's step. Options of param
    groups (lr, betas, ...) are set in the torch.optim optimizer of an engine or of `from_torch`;
    those of a rule of `fzero.optim` are fixed by code, and a warning says which are others. A loss
    scale that adapts itself takes the saved one. Of an engine's module the buffers are set.

    A frozen parameter, and one whose padded vocabulary is larger than the saved one (it grows by
    zeros), is taken, too.

    Each rank reads the elements that it keeps, from one parameter at a time. Everything goes into
    new memory first; the state or the engine is changed when all is read, on all ranks. The
    checksum of every file is looked at, nothing that a file says is executed, and no file outside
    of the checkpoint is read. Classes of DeepSpeed's own are passed over.

    Args:
        folder: what has latest_universal, of `save_universal` or of DeepSpeed's ds_to_universal.
        state: one state without gradients in a window, or an engine; a stacked state.
        tag: which checkpoint in `folder`; by default the one that latest_universal names.
        optimizer: False: only parameters, masters and buffers; all else stays as it is.

    Returns:
        The new state, without gradients; or the engine.

    Raises:
        CheckpointError: for a missing, damaged or foreign folder, for parameters that are missing,
            unknown, of another shape or of another step, naming file and parameter. Nothing was
            changed.
        LayoutError: for an empty path, a tag that is no name, or an optimizer or parameters that
            the layout has no place for.
        PhaseError: inside a coalesced step.

    Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load_universal, save_universal
        >>> opt = fzero.optim.sgd(1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_universal(folder, fzero.init([torch.ones(2)], opt, stage=2), tag="first")
        ...     state = load_universal(folder, fzero.init([torch.zeros(2)], opt, stage=3))
        >>> fzero.full_params(state)
        [tensor([1., 1.])]
    """
    wait_for_earlier(raises=False)
    held = held_by("load_universal", state)
    ranks, given = held.processes, held.states[0]
    where = path_everywhere(ranks, "load_universal", folder)
    facts = [f"path {where}", f"tag {tag}", f"{optimizer=}"]
    assert_same_everywhere(facts, ranks.axis, what="the checkpoint")

    def begin() -> list[str]:
        _require_tag(tag)
        for one in held.states:
            require_closed(one)
        require_places("load_universal", given)
        slots = {slot.name for slot in slots_of(given) if RULE + slot.name not in VALUES}
        return [FP32, *([STEP, *sorted(slots)] if optimizer else [])]

    doing = f"read {where}"
    keys = everywhere(ranks, begin, what=doing)
    name = from_first(ranks, lambda: latest(where) if tag is None else tag, what=doing)
    source = Folder(where / name)
    everywhere(ranks, lambda: _require_sound(source, given, keys, ranks), what=doing)
    shared = from_first(ranks, lambda: shared_of(source, given, held.engine, optimizer), what=doing)
    with torch.no_grad():
        states = everywhere(
            ranks, lambda: _filled(source, held, shared.counters, optimizer), what=doing
        )
        make_whole(held, states, _reads(optimizer))
        states = begun_slots(held, states, f"load_universal: {where / name}")
    made = held.returned(states, shared.buffers)
    if shared.options:
        set_options(given.setup.optimizer.param_groups((), 0).instance, shared.options)
    if shared.differing:
        warnings.warn(_differing(shared.differing), UserWarning, stacklevel=2)
    return made


def _require_sound(source: Folder, state: TrainState, keys: Sequence[str], ranks: Ranks) -> None:
    """Raise `CheckpointError` for a damaged or unknown file; the ranks share the reading."""
    source.require_there()
    names = names_in(source, state)
    known = {path for paths in all_paths(state.setup.layout) for path in paths}
    for name in source.names():
        if name not in known:
            raise damaged(
                source.root / ZERO / name, "is a parameter that this state has not, with moments"
            )
    for name in names:
        source.require_joined(name)
    held = (source.file(name, key) for name in names for key in keys)
    files = [file for file in held if file is not None]
    files += [source.root / ZERO / OPTIMIZER] if STEP in keys else []
    files += sorted(source.root.glob(f"*{STATES}"))
    for number, file in enumerate(files):
        require_own(file, source.root)
        if number % ranks.axis.size == ranks.axis.rank:
            require_sound(file)


def _filled(
    source: Folder, held: Held, counters: Mapping[str, Any], optimizer: bool
) -> list[TrainState]:
    """Return new states with the values of the files: of each flat, this rank's own shard."""
    leaves, names = held.setup.layout.leaves, names_in(source, held.states[0])

    def values(number: int, kind: str) -> Tensor:
        key = FP32 if kind in VALUES else kind.removeprefix(RULE)
        leaf, name = leaves[number], names[number]
        found = source.values(name, key, leaf.shape)
        if not are_alike(found.dtype, leaf.dtype):
            seen = f"has {name} as {found.dtype}, {leaf.dtype} in the state"
            raise damaged(source.root / ZERO / name, seen)
        return found

    reads = _reads(optimizer)
    made = [
        numbered(with_room(old, rank, reads), counters)
        for old, rank in zip(held.states, held.ranks, strict=True)
    ]
    read_leaves(held, made, reads, values)
    return made


def _reads(optimizer: bool) -> Callable[[Entry], bool]:
    """Return which entries of a state are read: all of the rule's, or masters alone."""
    return lambda one: has_values(one) or (optimizer and one.name.startswith(RULE))


def _require_tag(tag: str | None) -> None:
    if tag is not None and not (isinstance(tag, str) and is_name(tag)):
        raise LayoutError(
            f"load_universal: the tag {tag!r:.80} is no name of a folder.",
            cause="a path, or the number of a step.",
            fix="give the name of one folder in the path, or none for the latest.",
        )


def _differing(lines: Sequence[str]) -> str:
    return explain(
        "load_universal: options in the checkpoint are others than those of the rule here: "
        f"{'; '.join(lines)}.",
        cause="a rule of fzero.optim has its options from code; they were not changed.",
        fix="make the rule with the options that you want, or use fzero.optim.from_torch, whose "
        "options are set.",
    )
