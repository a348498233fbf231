"""Whole parameters for others: safetensors files, and the `state_dict` of a plain module."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from fzero.checkpoint._behind import wait_for_earlier
from fzero.checkpoint._folders import PathLike, path_everywhere
from fzero.checkpoint._held import Held, held_by, whole_leaves
from fzero.checkpoint._safetensors import (
    INDEX,
    Place,
    TensorForm,
    begin_file,
    split_files,
    write_values,
)
from fzero.checkpoint.disk import is_there, sync_files
from fzero.checkpoint.driven import Driven, buffers_of
from fzero.checkpoint.everywhere import written_by_first
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.by_path import all_paths, leaf_paths
from fzero.state import TrainState


def export_safetensors(
    folder: PathLike, state: TrainState | Driven, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write all parameters to model-0000i-of-0000N.safetensors, as Hugging Face reads them.

    A collective. Names are the paths of the parameters, a tied one once, under its first path; of
    an engine also the persistent buffers of its module, those of rank 0.
    `model.safetensors.index.json` says which file has what. Parameters are gathered unit by unit,
    and rank 0 writes each at once: no rank holds more than its part and one unit.

    Files of an earlier export are replaced when all is written, and until then they stay.

    Args:
        folder: where to; it is made if it is not there. Give it a config.json for from_pretrained.
        state: a state, or an engine.
        max_shard_bytes: of the tensors in one file; a larger tensor has a file of its own.

    Raises:
        LayoutError: for an empty path, a bound below 1, or a dtype that the format has not.
        DonatedError: for a used-up state.
        CheckpointError: on every rank, when the disk does not take it.

    Source: Hugging Face, safetensors, and "Big models" of transformers, for the index.

    Example:
        >>> import tempfile, torch, fzero
        >>> state = fzero.init({"w": torch.ones(2, 2)}, fzero.optim.sgd(0.1), stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.export_safetensors(folder, state)
        ...     made = fzero.checkpoint.safetensors_initializer(folder)("w", torch.empty(2, 2))
        >>> made
        tensor([[1., 1.],
                [1., 1.]])
    """
    wait_for_earlier(raises=False)
    held = held_by("export_safetensors", state)
    ranks, layout, buffers = held.processes, held.setup.layout, held.buffers
    where = path_everywhere(ranks, "export_safetensors", folder)
    facts = [f"path {where}", f"step {int(held.states[0].step)}", f"{max_shard_bytes} bytes"]
    assert_same_everywhere(facts, ranks.axis, what="the export")
    names = leaf_paths(layout)
    forms = {
        name: TensorForm(leaf.shape, leaf.dtype)
        for name, leaf in zip(names, layout.leaves, strict=True)
    }
    forms |= {name: TensorForm(tuple(x.shape), x.dtype) for name, x in buffers.items()}

    places: dict[str, Place] = {}

    def begin(partial: Path) -> None:
        _require_bound(max_shard_bytes)
        if ranks.axis.rank == 0:
            places.update(_begun(partial, forms, max_shard_bytes))
            for new in partial.iterdir():
                is_there(where / new.name)
            for old in where.glob("model*.safetensors"):
                is_there(old)

    def values() -> Iterator[tuple[str, Tensor]]:
        for number, value in whole_parameters(held):
            yield names[number], value
        yield from buffers.items()

    written_by_first(
        ranks,
        where,
        begin=begin,
        values=values(),
        write=lambda _, named: write_values(places[named[0]], named[1]),
        finish=lambda partial: _put_in_place(partial, where),
    )


def state_dict(state: TrainState | Driven, module: nn.Module | None = None) -> dict[str, Tensor]:
    """Return {name: whole values}, on the CPU, which `module.load_state_dict` takes. A collective.

    Each unit is gathered, copied to the CPU, and let go. The names are those of
    `module.state_dict()`: a tied parameter at each of its names, and the module's buffers. Without
    a module, which an engine has itself, they are the paths of the state's parameters.

    Args:
        state: a state, or an engine.
        module: the module that the state's parameters came from (`fzero.functionalize`), on any
            device: its names are used, and its buffers.

    Returns:
        Tensors that nobody else has, on every rank.

    Raises:
        LayoutError: for a module with a parameter that the state has not.
        DonatedError: for a used-up state.

    Example:
        >>> import torch, fzero
        >>> module = torch.nn.BatchNorm1d(2)
        >>> apply, params, buffers = fzero.functionalize(module, buffers=True)
        >>> state = fzero.init(params, fzero.optim.sgd(0.1), stage=3)
        >>> module.load_state_dict(fzero.checkpoint.state_dict(state, module))
        <All keys matched successfully>
    """
    held = held_by("state_dict", state)
    facts = [f"step {int(held.states[0].step)}"]
    assert_same_everywhere(facts, held.processes.axis, what="state_dict")
    by_path = values_by_path(held)
    of = module if held.engine is None else held.engine.module
    if of is None:
        return by_path
    result = {}
    first: dict[int, str] = {}
    for name, parameter in of.named_parameters(remove_duplicate=False):
        path = first.setdefault(id(parameter), name)
        value = by_path.get(name, by_path.get(path))
        if value is None:
            raise LayoutError(
                f"state_dict: the state has no parameter {name}; it has {[*by_path][:6]} ...",
                cause="another module than the one that the state was made of.",
                fix="pass the module that was given to functionalize, or none.",
            )
        result[name] = value
    return result | {name: x.cpu().clone() for name, x in buffers_of(of).items()}


def values_by_path(held: Held, paths: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return {path: whole values} on the CPU, a tied leaf at each of its paths. A collective.

    paths: of the leaves that are wanted; by default all of them.
    """
    of_leaves, found = all_paths(held.setup.layout), dict[str, Tensor]()
    wanted = {i for i, some in enumerate(of_leaves) if paths is None or {*some} & {*paths}}
    for number, values in whole_parameters(held, wanted):
        copied = torch.empty_like(values, device="cpu").copy_(values)
        found.update(dict.fromkeys(of_leaves[number], copied))
    return found


def whole_parameters(held: Held, wanted: Set[int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the leaf, whole values), gathered group by group. A collective.

    wanted: the leaves; by default all of them. Groups without any are not gathered.
    """
    for index, group in enumerate(held.setup.layout.groups):
        if wanted is not None and wanted.isdisjoint(group.leaves):
            continue
        flats = [one.params.flats[index] for one in held.states]
        for number, values in whole_leaves(held, index, flats, held.setup.params):
            if wanted is None or number in wanted:
                yield number, values


def _begun(partial: Path, forms: Mapping[str, TensorForm], max_bytes: int) -> dict[str, Place]:
    partial.mkdir(parents=True)
    shards = split_files(forms, max_bytes)
    places: dict[str, Place] = {}
    file_of = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= begin_file(partial / file, {name: forms[name] for name in names})
        file_of |= dict.fromkeys(names, file)
    total = sum(form.nbytes for form in forms.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (partial / INDEX).write_text(json.dumps(index, indent=2))
    return places


def _put_in_place(partial: Path, folder: Path) -> None:
    """Replace an earlier export. Without its index nobody reads files of both."""
    new = {file.name for file in partial.iterdir()}
    sync_files(partial.iterdir())
    (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in new:
            old.unlink()
    for name in sorted(new, key=lambda name: name == INDEX):
        os.replace(partial / name, folder / name)


def _require_bound(max_shard_bytes: int) -> None:
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise LayoutError(
            f"export_safetensors: max_shard_bytes={max_shard_bytes!r}.",
            cause='a size as text ("5GB"), or zero.',
            fix="give a number of bytes, at least 1.",
        )
