"""Parameters from safetensors files, without any rank holding the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

from fzero.checkpoint._complete import are_alike, make_whole, read_leaves, require_equal, with_room
from fzero.checkpoint._folders import PathLike, as_path, locked, path_everywhere
from fzero.checkpoint._held import held_by, require_closed
from fzero.checkpoint._safetensors import (
    Place,
    TensorForm,
    places_in,
    read_index,
    read_values,
)
from fzero.checkpoint.everywhere import everywhere, from_first
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.by_path import all_paths
from fzero.state import TrainState
from fzero.transforms.kept import has_values

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


def import_safetensors(folder: PathLike, state: Thing) -> Thing:
    """Return a state like `state`, or the engine, with the parameters of the files. A collective.

    The optimizer's fp32 masters take the values as the files have them; its other slots, the step
    and all else stay as they are. Of an engine's module, buffers that the files have are set, too.
    Names in the files that the model has not are left out. Each rank reads the parameters of which
    it keeps elements, one at a time.

    Args:
        folder: of `export_safetensors`, of `save_pretrained`, or with one model.safetensors.
        state: a state without gradients in a window, or an engine.

    Returns:
        The new state, or the engine.

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

    def read(index: dict[str, str]) -> tuple[list[TrainState], dict[str, Tensor]]:
        for one in held.states:
            require_closed(one)
        places = places_in(where, index)
        layout = held.setup.layout
        found = [
            _found(places, paths, TensorForm(leaf.shape, leaf.dtype))
            for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True)
        ]
        for paths in all_paths(layout):
            some = [path for path in dict.fromkeys(paths) if path in places]
            require_equal(where, some, lambda name: read_values(places[name]))
        buffers = {
            name: read_values(_found(places, [name], TensorForm(tuple(x.shape), x.dtype)))
            for name, x in held.buffers.items()
            if name in places
        }
        pairs = zip(held.states, held.ranks, strict=True)
        made = [with_room(one, rank, has_values) for one, rank in pairs]
        read_leaves(held, made, has_values, lambda leaf, _: read_values(found[leaf]))
        return made, buffers

    with torch.no_grad(), until_read:
        what = f"read {where}"
        index = from_first(held.processes, begin, what=what)  # the same one on all ranks
        states, buffers = everywhere(held.processes, lambda: read(index), what=what)
        make_whole(held, states, has_values)
        return held.returned(states, buffers)


def _found(places: Mapping[str, Place], paths: list[str], wanted: TensorForm) -> Place:
    place = next((places[path] for path in paths if path in places), None)
    if place is None:
        raise LayoutError(
            f"the files have no {paths[0]}; they have {[*places][:6]} ...",
            cause="another model, or names with another prefix.",
            fix="pass the files of this model.",
        )
    form = place.form
    if form.shape != wanted.shape or not are_alike(form.dtype, wanted.dtype):
        raise LayoutError(
            f"{paths[0]} is {form.shape} {form.dtype} in {place.file.name}, "
            f"{wanted.shape} {wanted.dtype} in the model.",
            cause="another model, or a transposed or quantized weight.",
            fix="pass the files of this model.",
        )
    return place
