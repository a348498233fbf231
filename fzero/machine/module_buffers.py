"""What a module has beside its parameters: buffers, and tensors in attributes. Alike on all ranks?

All ranks train with rank 0's parameters, whatever the others were given. A random projection or a
table that each rank has made from its own seed would stay each rank's own, and ranks would train
other models. So ranks compare digests of these tensors when they first meet: when a state or an
engine is made. What is meant to differ is named by `own`, paths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fzero.context.current_rank import is_abstract
from fzero.errors import LayoutError, MismatchError
from fzero.errors.check import require
from fzero.machine.packing import digest
from fzero.machine.partition import HeldTensor, Holder, is_made_of_others
from fzero.machine.placeholder import LazyParam

_NOTE = "_fzero_beside"
_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has: tables, and hooks
_HEAD = "tensor beside the parameters: "
_NAMES = {Holder.BUFFER: "buffer", Holder.ATTRIBUTE: "attribute"}


class TensorsBeside:
    """The tensors of a functionalized module that are no parameters, as a note on those that are.

    It goes with the tensors that it is noted on, and into no copy and no file.
    """

    def __init__(self, held: Sequence[HeldTensor], own: Sequence[str]) -> None:
        self._held, self._own = held, own
        self._known: tuple[list[int], list[str]] | None = None

    def lines(self) -> list[str]:
        """Return what ranks compare; virtual ranks, which share the module, read it once."""
        versions = [0 if one.tensor.is_inference() else one.tensor._version for one in self._held]
        if self._known is None or self._known[0] != versions:
            self._known = versions, lines_of(self._held, self._own)
        return self._known[1]

    def __deepcopy__(self, memo: Any) -> TensorsBeside:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Leave nothing in a file, which torch.load(weights_only=True) then takes."""
        return OrderedDict, ()


def note(tensors: Iterable[Tensor], beside: TensorsBeside) -> None:
    """Note on tensors that stand for parameters what else their module has."""
    for tensor in tensors:
        vars(tensor)[_NOTE] = beside


def noted_lines(tensors: Iterable[Tensor]) -> list[str]:
    """Return the lines of all that was noted on these tensors, for ranks to compare."""
    if is_abstract():
        return []
    found = {id(x): x for t in tensors if isinstance(x := vars(t).get(_NOTE), TensorsBeside)}
    return [line for beside in found.values() for line in beside.lines()]


def require_paths(own: Any, held: Sequence[HeldTensor]) -> tuple[str, ...]:
    """Return the paths of `own`; raise `LayoutError` for one that names no tensor.

    A path names a tensor, or all in a container or a submodule.
    """
    good = not isinstance(own, str) and isinstance(own, Collection)
    strings = good and all(isinstance(path, str) for path in own)
    require("own", own, lambda _: strings, 'paths of tensors of the module: ["rope.table"]')
    for path in own:
        if not any(is_own(one.path, [path]) for one in held):
            known = [one.path for one in held]
            raise LayoutError(
                f"own={[*own]}: the module has no tensor {path!r} beside its parameters.",
                cause="a misspelt path, or that of a parameter: all ranks train the same ones.",
                fix=f"use some of {known[:6]}{' ...' * (len(known) > 6)}.",
            )
    return tuple(own)


def held_beside(module: nn.Module) -> list[HeldTensor]:
    """Return the buffers and the tensors in attributes of a module, and in those of parameters.

    Not those in sets, which have no order; nor what autograd has made of parameters, and other
    handles on a parameter.
    """
    params = {id(p) for p in module.parameters()}
    buffers = [HeldTensor(k, x, Holder.BUFFER) for k, x in module.named_buffers()]
    known = params | {id(one.tensor) for one in buffers}
    found = [one for one in buffers if not is_lazy(one.tensor)]
    owners: list[tuple[str, Any]] = [*module.named_modules()]
    owners += [(k, p) for k, p in module.named_parameters() if not isinstance(p, LazyParam)]
    for path, owner in owners:
        skipped = _TORCHS if isinstance(owner, nn.Module) else ()
        for name, value in vars(owner).items():
            if name not in skipped and not name.startswith("_fzero"):
                for where, x in _inside(value, f"{path}.{name}".lstrip("."), set()):
                    if id(x) not in known and x.grad_fn is None and not is_lazy(x):
                        found.append(HeldTensor(where, x, Holder.ATTRIBUTE))
    return found


def lines_of(
    held: Iterable[HeldTensor], own: Sequence[str], *, unread: Collection[Holder] = ()
) -> list[str]:
    """Return a line for each tensor that is to be alike on all ranks: its form, and a digest.

    unread: of which kinds the values do not count.
    """
    chosen = {one.path: one for one in held if not is_own(one.path, own)}
    return [_line(one, one.kind not in unread) for _, one in sorted(chosen.items())]


def apart_from(held: Sequence[HeldTensor], module: nn.Module) -> list[HeldTensor]:
    """Return those without what lies in the memory of a parameter or a buffer of a module."""
    homes = {_home(x) for x in (*module.parameters(), *module.buffers())} - {0}
    return [one for one in held if one.kind is Holder.BUFFER or _home(one.tensor) not in homes]


def difference(rank: int, mine: str, theirs: str) -> MismatchError | None:
    """Return the error for the first line that differs, if it is one of `lines_of`."""
    ours = [line.removeprefix(_HEAD) for line in (mine, theirs) if line.startswith(_HEAD)]
    if not ours:
        return None
    kind, _, rest = ours[0].partition(" ")
    path = rest.partition(": ")[0]
    if len(ours) < 2 or not ours[1].startswith(f"{kind} {path}: "):
        seen = f"the {kind} {path} is not on all of the ranks 0 and {rank}"
    else:
        forms = [line.partition(": ")[2] for line in ours]
        seen = f"the {kind} {path} differs on ranks 0 and {rank}: {forms[0]}, and {forms[1]}"
    return MismatchError(
        f"{seen}.",
        cause="ranks that were seeded differently before they built the module, or a table that "
        "depends on the rank. All ranks get rank 0's parameters; this tensor would stay each "
        "rank's own, so that they train other models.",
        fix="seed alike while the module is built, and by rank after it (torch.manual_seed); or "
        f"register_buffer it, of which an Engine takes rank 0's; if a rank is to have its own, "
        f"own=[{path!r}] of functionalize(module, own=) or Engine(..., own=).",
    )


def _line(one: HeldTensor, reads: bool) -> str:
    x = one.tensor
    form = f"{_HEAD}{_NAMES[one.kind]} {one.path}: {tuple(x.shape)} {x.dtype}"
    plain = x.layout is torch.strided and not x.is_quantized and not x.is_nested
    plain = plain and not is_made_of_others(x)
    if not reads or not plain or x.is_meta:
        return form
    return f"{form}, bits {digest(x.detach()):016x}"


def is_own(path: str, own: Iterable[str]) -> bool:
    """Whether a path is among those of `own`, or inside of what one of them names."""
    return any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in own)


def _home(x: Tensor) -> int:
    """Return the address of the storage of a tensor; 0 if it has none."""
    plain = x.layout is torch.strided and not (is_lazy(x) or x.is_nested or is_made_of_others(x))
    return Tensor.untyped_storage(x).data_ptr() if plain and not x.is_meta else 0


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an attribute, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple | Mapping) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            simple = isinstance(key, str | int | float)
            yield from _inside(part, f"{path}[{key!r}]" if simple else f"{path}[...]", seen)
