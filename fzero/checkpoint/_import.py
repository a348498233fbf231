"""Parameters from safetensors files, without any rank holding the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from fzero.checkpoint._allocate import are_alike, make_whole, read_leaves, require_equal, with_room
from fzero.checkpoint._partial import LoadReport, Rename, new_name, require_one, require_some
from fzero.checkpoint._pieces import overlap
from fzero.checkpoint._process_states import held_by, require_closed
from fzero.checkpoint._safetensors import Place, TensorForm, places_in, read_index, read_values
from fzero.checkpoint.collective import everywhere, from_first
from fzero.checkpoint.folders import PathLike, as_path, locked, path_everywhere
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.named_shards import all_paths
from fzero.state import TrainState
from fzero.transforms.state_entries import has_values

Thing = TypeVar("Thing")


def safetensors_initializer(folder: PathLike) -> Callable[[str, Tensor], Tensor]:
    """Return (path, leaf) -> the values of that leaf in the files: for `fzero.init(initializer=)`.

    With parameters on the meta device no rank ever holds the model: one leaf at a time is read. A
    floating leaf of another dtype than in the file is converted.

    Args:
        folder: of `export_safetensors`, of `save_pretrained`, or with one model.safetensors.

    Raises:
        CheckpointError: for missing or damaged files.
        LayoutError: where it is called: for a leaf that the files have not, or in another shape.

    Example:
        >>> import tempfile, torch, fzero
        >>> with torch.device("meta"):
        ...     params = {"w": torch.empty(3)}
        >>> state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(1.0), stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.export_safetensors(folder, state)
        ...     values = fzero.checkpoint.safetensors_initializer(folder)
        ...     made = fzero.init(params, fzero.optim.sgd(1.0), stage=3, initializer=values)
        >>> fzero.full_params(made)
        {'w': tensor([1., 1., 1.])}
    """
    places = places_in(as_path("safetensors_initializer", folder))

    def initializer(path: str, leaf: Tensor) -> Tensor:
        place = _found(places, [path], TensorForm(tuple(leaf.shape), leaf.dtype))
        return read_values(place).to(
            device="cpu" if leaf.is_meta else leaf.device, dtype=leaf.dtype
        )

    return initializer


@overload
def import_safetensors(
    folder: PathLike,
    state: Thing,
    *,
    strict: Literal[True] = True,
    rename: Rename | None = None,
) -> Thing: ...
@overload
def import_safetensors(
    folder: PathLike, state: Thing, *, strict: Literal[False], rename: Rename | None = None
) -> tuple[Thing, LoadReport]: ...
def import_safetensors(
    folder: PathLike, state: Thing, *, strict: bool = True, rename: Rename | None = None
) -> Thing | tuple[Thing, LoadReport]:
    """Return a state like `state`, or the engine, with the parameters of the files. A collective.

    The optimizer's fp32 masters take the values as the files have them; its other slots, the step
    and all else stay as they are. Of an engine's module, buffers that the files have are set, too.
    Names in the files that the model has not are left out. Each rank reads the parameters of which
    it keeps elements, one at a time.

    Args:
        folder: of `export_safetensors`, of `save_pretrained`, or with one model.safetensors.
        state: a state without gradients in a window, or an engine.
        strict: False: for files of another model, as of `load`: what they have not stays as it is,
            of what has another shape what is in both is set.
        rename: a function of a name in the files: its name in the state, or None to leave it out.

    Returns:
        The new state, or the engine; with `strict=False` (that, report), as `load` does.

    Raises:
        CheckpointError: for missing or damaged files; nothing was changed.
        LayoutError: for a parameter that the files have not, or in another shape or kind of dtype.

    Example:
        >>> import tempfile, torch, fzero
        >>> rule = fzero.optim.sgd(1.0)
        >>> one = fzero.init([torch.ones(2)], rule, stage=2)
        >>> two = fzero.init([torch.zeros(2)], rule, stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.export_safetensors(folder, one)
        ...     two = fzero.checkpoint.import_safetensors(folder, two)
        >>> fzero.full_params(two)
        [tensor([1., 1.])]
    """
    held = held_by("import_safetensors", state)
    where = path_everywhere(held.processes, "import_safetensors", folder)
    assert_same_everywhere([f"path {where}"], held.processes.axis, what="the import")

    until_read = ExitStack()

    def begin() -> dict[str, str]:
        until_read.enter_context(locked(where, alone=False, file=""))
        return read_index(where)

    def read(index: dict[str, str]) -> tuple[list[TrainState], dict[str, Tensor], LoadReport]:
        for one in held.states:
            require_closed(one)
        places = _renamed(places_in(where, index), rename)
        layout = held.setup.layout
        report = LoadReport([], [], [])

        def found(names: list[str], wanted: TensorForm) -> Place | None:
            """Return where something is; None where nothing is that has to be."""
            if strict or not {*names}.isdisjoint(places):
                place = _found(places, names, wanted, resizes=not strict)
                if place.form.shape != wanted.shape:
                    report.resized.append(names[0])
                return place
            report.missing.append(names[0])
            return None

        of_leaves = [
            found(paths, TensorForm(leaf.shape, leaf.dtype))
            for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True)
        ]
        for paths in all_paths(layout):
            some = [path for path in dict.fromkeys(paths) if path in places]
            require_equal(where, some, lambda name: read_values(places[name]))
        buffers = {
            name: x.detach().cpu().clone() for name, x in held.buffers.items() if name in places
        }
        for name, own in buffers.items():
            place = found([name], TensorForm(tuple(own.shape), own.dtype))
            assert place is not None
            common = overlap(0, own.numel(), tuple(own.shape), place.form.shape)
            common.fill(own.view(-1), read_values(place).view(-1))
        if not strict:
            known = {path for paths in all_paths(layout) for path in paths} | held.buffers.keys()
            require_some("import_safetensors", where, places, known)
            report.missing.extend(name for name in held.buffers if name not in buffers)
            used = {place.name for name, place in places.items() if name in known}
            left = (name for name in places.keys() - known if places[name].name not in used)
            report.unexpected.extend(sorted(left))
        pairs = zip(held.states, held.ranks, strict=True)
        made = [with_room(one, rank, has_values, copies=not strict) for one, rank in pairs]

        def values(leaf: int, _: str) -> Tensor | None:
            return None if (place := of_leaves[leaf]) is None else read_values(place)

        read_leaves(held, made, has_values, values)
        return made, buffers, report

    with torch.no_grad(), until_read:
        what = f"read {where}"
        index = from_first(held.processes, begin, what=what)  # the same one on all ranks
        states, buffers, report = everywhere(held.processes, lambda: read(index), what=what)
        make_whole(held, states, has_values)
        made = held.returned(states, buffers)
    return made if strict else (made, report)


def _renamed(places: Mapping[str, Place], rename: Rename | None) -> dict[str, Place]:
    found, taken = dict[str, Place](), dict[str, str]()
    for name, place in places.items():
        if (new := new_name(rename, name)) is not None:
            require_one(taken, new, name)
            found[new] = place
    return found


def _found(
    places: Mapping[str, Place], paths: list[str], wanted: TensorForm, *, resizes: bool = False
) -> Place:
    place = next((places[path] for path in paths if path in places), None)
    if place is None:
        raise LayoutError(
            f"the files have no {paths[0]}; they have {[*places][:6]} ...",
            cause="another model, or names with another prefix.",
            fix="pass the files of this model.",
        )
    form = place.form
    fits = len(form.shape) == len(wanted.shape) if resizes else form.shape == wanted.shape
    if not fits or not are_alike(form.dtype, wanted.dtype):
        raise LayoutError(
            f"{paths[0]} is {form.shape} {form.dtype} in {place.file.name}, "
            f"{wanted.shape} {wanted.dtype} in the model.",
            cause="another model, or a transposed or quantized weight.",
            fix="pass the files of this model.",
        )
    return place
