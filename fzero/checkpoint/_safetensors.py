"""The safetensors format: 8 bytes with the header's length, a JSON header, the values.

    header   {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}, in bytes from
             the end of the header; the ranges follow each other without gap or overlap

Source: Hugging Face, safetensors, section "Format" of its README.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from fzero.checkpoint import folders
from fzero.checkpoint._allocate import are_alike, make_whole, read_leaves, require_equal, with_room
from fzero.checkpoint._partial import LoadReport, Rename, new_name, require_one, require_some
from fzero.checkpoint._pieces import overlap
from fzero.checkpoint._process_states import LocalStates, local_states, require_closed, whole_leaves
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint._storage import bytes_of
from fzero.checkpoint.collective import (
    CheckpointError,
    damaged,
    from_first,
    on_all_ranks,
    written_by_first,
)
from fzero.checkpoint.engine_state import EngineLike, buffers_of
from fzero.checkpoint.folders import PathLike
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError, explain
from fzero.errors.check import is_count, require
from fzero.machine.named_shards import all_paths, leaf_paths, tied_names
from fzero.state import TrainState
from fzero.transforms.state_entries import has_values

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAME = re.compile(r"[^/\\\0]*[^/\\\0.][^/\\\0]*\.safetensors")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorForm(NamedTuple):
    """A tensor before its values are there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where the values of a tensor are."""

    file: Path
    name: str
    begin: int
    form: TensorForm
    mark: tuple[int, int] | None = None  # of the file that was looked at; None: it is being made


def split_files(forms: Mapping[str, TensorForm], max_bytes: int) -> list[list[str]]:
    """Return which names share a file: in their order, a file full before the next one begins.

    Example:
        >>> forms = {name: TensorForm((4,), torch.float32) for name in "abc"}
        >>> split_files(forms, 32)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name, form in forms.items():
        if shards[-1] and held + form.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += form.nbytes
    return shards


def begin_file(
    file: Path, forms: Mapping[str, TensorForm], tied: Mapping[str, str] | None = None
) -> dict[str, Place]:
    """Write the header of a file, and make room for the values; return where each one goes.

    tied: other names of what is in it, which are written as safetensors.torch.save_model does.

    Raises `LayoutError` for a dtype that the format has not.
    """
    # The widest dtype first: so each tensor begins at a multiple of the size of its elements.
    names = sorted(forms, key=lambda name: -forms[name].dtype.itemsize)
    more = {other: name for other, name in (tied or {}).items() if name in forms}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **more}}
    ends = 0
    for name in names:
        form = forms[name]
        begin, ends = ends, ends + form.nbytes
        if form.dtype not in _NAMES:
            raise LayoutError(
                f"export_safetensors: {name} is {form.dtype}, for which the format has no name.",
                cause="a parameter or buffer that is quantized, or complex of 128 bits.",
                fix="save it with fzero.checkpoint.save, or convert it before.",
            )
        header[name] = {
            "dtype": _NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [begin, ends],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb", opener=folders.regular) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + ends)
    begins = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in names}
    return {name: Place(file, name, begin, forms[name]) for name, begin in begins.items()}


def write_values(place: Place, values: Tensor) -> None:
    """Write the values of one tensor to where they go."""
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    with open(place.file, "r+b", opener=folders.regular) as stream:
        stream.seek(place.begin)
        if flat.numel():
            stream.write(bytes_of(flat))


def read_values(place: Place) -> Tensor:
    """Read the values of one tensor; no other bytes of its file."""
    form = place.form
    data = bytearray(form.nbytes)
    with open(place.file, "rb", opener=folders.regular) as stream:
        found = os.fstat(stream.fileno())
        if place.mark not in (None, (found.st_mtime_ns, found.st_size)):
            raise damaged(place.file, "was replaced since its header was read")
        stream.seek(place.begin)
        if stream.readinto(data) != len(data):
            raise damaged(place.file, "is shorter than it was")
    if not data:
        return torch.empty(form.shape, dtype=form.dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(form.dtype).reshape(form.shape)


def read_index(folder: Path) -> dict[str, str]:
    """Return which file of a folder has each tensor, by its index; {} where there is one file.

    Raises `CheckpointError`, naming the file, for what is not as the format has it.
    """
    index = folder / INDEX
    if not folders.is_there(index):
        if not folders.is_there(folder / SINGLE):
            raise CheckpointError(
                f"there are no weights at {folder}: no {INDEX} and no {SINGLE} in it.",
                cause="a mistyped path, or an export that was cut off.",
                fix="pass the folder of export_safetensors, or of save_pretrained.",
            )
        return {}
    with open(index, "rb", opener=folders.regular) as stream:
        file_of = _json(index, stream.read()).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise damaged(index, "has no weight_map")
    for name, file in file_of.items():
        if not isinstance(file, str) or not _NAME.fullmatch(file):
            raise damaged(index, f"has {name} in {file!r:.200}, which is no file of the folder")
    return file_of


def places_in(folder: Path, file_of: Mapping[str, str] | None = None) -> dict[str, Place]:
    """Return where each tensor of a folder is: by its index, or in its one file.

    file_of: what `read_index` has returned; by default it is read. Raises as that does.
    """
    file_of = read_index(folder) if file_of is None else file_of
    if not file_of:
        return read_file(folder / SINGLE)
    files: dict[str, dict[str, Place]] = {}
    for name, file in file_of.items():
        if file not in files:
            if not folders.is_there(folder / file):
                raise damaged(folder / file, "is missing")
            files[file] = read_file(folder / file)
        if name not in files[file]:
            raise damaged(folder / file, f"has no {name}, which its index says")
    every = {name: place for places in files.values() for name, place in places.items()}
    tied = {name: place for name, place in every.items() if place.name != name}
    return {**tied, **{name: files[file][name] for name, file in file_of.items()}}


def read_file(file: Path) -> dict[str, Place]:
    """Return where each tensor of a file is, a tied one at each name that the header says.

    Raises `CheckpointError` for a damaged one.
    """
    if not folders.is_there(file):
        raise damaged(file, "is missing")
    with open(file, "rb", opener=folders.regular) as stream:
        found = os.fstat(stream.fileno())
        length, size = int.from_bytes(stream.read(8), "little"), found.st_size
        if not 0 < length <= size - 8:
            raise damaged(file, f"of {size:,} bytes has no header of {length:,} bytes")
        header = _json(file, stream.read(length))
    first, mark, made = 8 + length, (found.st_mtime_ns, size), dict[str, Place]()
    more = header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            form = TensorForm(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            good = all(type(n) is int and n >= 0 for n in (begin, end, *form.shape))
            good = good and end - begin == form.nbytes and first + end <= size
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise damaged(file, f"has no tensor {name} where its header says: {entry!r:.200}")
        made[name] = Place(file, name, first + begin, form, mark)
    tied = more.items() if isinstance(more, dict) else ()
    return {**{other: made[x] for other, x in tied if isinstance(x, str) and x in made}, **made}


def _json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"is no JSON: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise damaged(file, "holds no dict")
    return found


# Whole parameters for others: safetensors files, and the `state_dict` of a plain module.

_OWN = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""The names that an export gives."""


def export_safetensors(
    folder: PathLike, state: TrainState | EngineLike, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write all parameters to model-0000i-of-0000N.safetensors, as Hugging Face reads them.

    A collective. Names are the paths of the parameters, a tied one once, under its first path,
    with the others in the header; of an engine also the persistent buffers of its module, those of
    rank 0.
    `model.safetensors.index.json` says which file has what. Parameters are gathered unit by unit,
    and rank 0 writes each at once: no rank holds more than its part and one unit.

    An earlier export in the folder counts until the new index is put in its place, in one move; its
    files are removed then, unless somebody imports just now. So the new files have other names
    where these are taken: model-<8 hex digits>-0000i-of-0000N.safetensors. Other files stay.

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
    held = local_states("export_safetensors", state)
    ranks, layout, buffers = held.processes, held.setup.layout, held.buffers
    where = folders.shared_path(ranks, "export_safetensors", folder)
    facts = [f"step {int(held.states[0].step)}", f"{max_shard_bytes} bytes"]
    assert_same_everywhere(facts, ranks.axis, what="the export")
    names = leaf_paths(layout)
    pairs = zip(names, layout.leaves, strict=True)
    forms = {name: TensorForm(leaf.shape, leaf.dtype) for name, leaf in pairs}
    forms |= {name: TensorForm(tuple(x.shape), x.dtype) for name, x in buffers.items()}
    places: dict[str, Place] = {}
    until_written = ExitStack()

    def begin(partial: Path) -> None:
        name, wanted = "export_safetensors: max_shard_bytes", "a number of bytes, at least 1"
        require(name, max_shard_bytes, is_count, wanted, cause='a size as text ("5GB"), or zero.')
        if ranks.axis.rank:
            return
        where.mkdir(parents=True, exist_ok=True)
        until_written.enter_context(folders.locked(where, alone=False, file=""))
        folders.is_there(where / INDEX)
        for old in where.iterdir():
            if _OWN.fullmatch(old.name):
                folders.is_there(old)
        if folders.is_there(where / SINGLE):
            text = explain(
                f"export_safetensors: there is a {SINGLE} in {where}, which stays.",
                cause="a folder of save_pretrained with one file.",
                fix=f"remove {SINGLE}: from_pretrained of transformers reads it, and not the "
                "export. Or give another folder.",
            )
            warnings.warn(text, UserWarning, stacklevel=2)
        partial.mkdir(parents=True)
        shards, tied = split_files(forms, max_shard_bytes), tied_names(layout)
        for number, some in enumerate(shards, start=1):
            file = partial / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            places.update(begin_file(file, {name: forms[name] for name in some}, tied))

    def values() -> Iterator[tuple[str, Tensor]]:
        for number, value in whole_parameters(held):
            yield names[number], value
        yield from buffers.items()

    def put(_: Path, one: tuple[str, Tensor]) -> None:
        write_values(places[one[0]], one[1])

    def put_in_place(partial: Path) -> None:
        """Give the files names that nothing has, and then let the index name them."""
        new = sorted(partial.iterdir())
        folders.sync_files(new)
        # Each name is taken by an empty file: two exports never have one.
        taken, final = list[Path](), {file.name: file.name for file in new}
        try:
            for name in final:
                (where / name).open("xb").close()
                taken.append(where / name)
        except FileExistsError:
            for file in taken:
                file.unlink()
            mark = secrets.token_hex(4)
            final = {name: name.replace("model-", f"model-{mark}-", 1) for name in final}
        for file in new:
            os.replace(file, where / final[file.name])
        folders.sync_files([where])
        index = {
            "metadata": {"total_size": sum(form.nbytes for form in forms.values())},
            "weight_map": {name: final[places[name].file.name] for name in forms},
        }
        folders.put_text(where / INDEX, json.dumps(index, indent=2), through=partial / INDEX)
        folders.sync_files([where])

    with until_written:
        written_by_first(ranks, where, begin=begin, values=values(), write=put, finish=put_in_place)
    if ranks.axis.rank == 0:
        # The files of earlier exports go, if nobody exports or imports; what cannot be, stays.
        with (
            folders.locked(where, alone=True, file="") as alone,
            suppress(OSError, CheckpointError),
        ):
            named = {place.file for place in places_in(where).values()} if alone else set[Path]()
            for old in where.iterdir() if alone else ():
                if _OWN.fullmatch(old.name) and old not in named:
                    old.unlink()


def state_dict(
    state: TrainState | EngineLike, module: nn.Module | None = None
) -> dict[str, Tensor]:
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
    held = local_states("state_dict", state)
    step = f"step {int(held.states[0].step)}"
    assert_same_everywhere([step], held.processes.axis, what="state_dict")
    by_path = values_by_path(held)
    of = module if held.engine is None else held.engine.module
    if of is None:
        return by_path
    result, first = dict[str, Tensor](), dict[int, str]()
    for name, parameter in of.named_parameters(remove_duplicate=False):
        path = first.setdefault(id(parameter), name)
        if (value := by_path.get(name, by_path.get(path))) is None:
            raise LayoutError(
                f"state_dict: the state has no parameter {name}; it has {[*by_path][:6]} ...",
                cause="another module than the one that the state was made of.",
                fix="pass the module that was given to functionalize, or none.",
            )
        result[name] = value
    return result | {name: x.cpu().clone() for name, x in buffers_of(of).items()}


def values_by_path(held: LocalStates, paths: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return {path: whole values} on the CPU, a tied leaf at each of its paths. A collective.

    paths: of the leaves that are wanted; by default all of them.
    """
    of_leaves, found = all_paths(held.setup.layout), dict[str, Tensor]()
    wanted = {i for i, some in enumerate(of_leaves) if paths is None or {*some} & {*paths}}
    for number, values in whole_parameters(held, wanted):
        copied = torch.empty_like(values, device="cpu").copy_(values)
        found.update(dict.fromkeys(of_leaves[number], copied))
    return found


def whole_parameters(
    held: LocalStates, wanted: Set[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
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


# Parameters from safetensors files, without any rank holding the model.

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
    places = places_in(folders.as_path("safetensors_initializer", folder))

    def initializer(path: str, leaf: Tensor) -> Tensor:
        place = _found(places, [path], TensorForm(tuple(leaf.shape), leaf.dtype))
        return read_values(place).to("cpu" if leaf.is_meta else leaf.device, leaf.dtype)

    return initializer


@overload
def import_safetensors(
    folder: PathLike, state: Thing, *, strict: Literal[True] = True, rename: Rename | None = None
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
    held = local_states("import_safetensors", state)
    where = folders.shared_path(held.processes, "import_safetensors", folder)
    until_read = ExitStack()

    def begin() -> dict[str, str]:
        until_read.enter_context(folders.locked(where, alone=False, file=""))
        return read_index(where)

    layout, report = held.setup.layout, LoadReport([], [], [])
    places, taken = dict[str, Place](), dict[str, str]()

    def found(names: list[str], wanted: TensorForm) -> Place | None:
        """Return where something is; None where nothing is that has to be."""
        if strict or not {*names}.isdisjoint(places):
            place = _found(places, names, wanted, resizes=not strict)
            if place.form.shape != wanted.shape:
                report.resized.append(names[0])
            return place
        report.missing.append(names[0])
        return None

    def values(leaf: int, _: str) -> Tensor | None:
        return None if (place := of_leaves[leaf]) is None else read_values(place)

    with torch.no_grad(), until_read:
        what = f"read {where}"
        index = from_first(held.processes, begin, what=what)  # the same one on all ranks
        with on_all_ranks(held.processes, what=what):
            for one in held.states:
                require_closed(one)
            for name, place in places_in(where, index).items():
                if (new := new_name(rename, name)) is not None:
                    require_one(taken, new, name)
                    places[new] = place
            of_leaves = [
                found(paths, TensorForm(leaf.shape, leaf.dtype))
                for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True)
            ]
            for paths in all_paths(layout):
                some = [path for path in dict.fromkeys(paths) if path in places]
                require_equal(where, some, lambda name: read_values(places[name]))
            buffers = {k: x.detach().cpu().clone() for k, x in held.buffers.items() if k in places}
            for name, own in buffers.items():
                place = found([name], TensorForm(tuple(own.shape), own.dtype))
                assert place is not None
                common = overlap(0, own.numel(), tuple(own.shape), place.form.shape)
                common.fill(own.view(-1), read_values(place).view(-1))
            if not strict:
                known = {path for paths in all_paths(layout) for path in paths} | {*held.buffers}
                require_some("import_safetensors", where, places, known)
                report.missing.extend(name for name in held.buffers if name not in buffers)
                used = {place.name for name, place in places.items() if name in known}
                left = (name for name in places.keys() - known if places[name].name not in used)
                report.unexpected.extend(sorted(left))
            states = [with_room(*pair, has_values, copies=not strict) for pair in held.pairs]
            read_leaves(held, states, has_values, values)
        make_whole(held, states, has_values)
        made = held.returned(states, buffers)
    return made if strict else (made, report)


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
