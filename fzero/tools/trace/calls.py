"""What each op of a graph is called with: values, by where they come from, and constants.

Constants are texts by which they are told apart: tensors and functions by what they are.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fzero.optim.recorded import SCHEDULES
from fzero.tools.trace.ops import Op, Phase, events_of, flats_of, is_params, names_of, short
from fzero.tools.trace.program import (
    COLLECTIVES,
    RATE,
    UPDATE,
    RecordedStep,
    inputs_of,
    is_item,
    is_op,
    root_of,
)
from fzero.tools.trace.schedules import facts_of


class Operand(NamedTuple):
    """A value that an op reads: some elements of an origin.

    origin: ("value", its name), ("parameter", path), ("shard", path of the flat), ("input", path)
    or ("constant", digest). Chains of views that give the same elements are the same.
    """

    name: str
    origin: tuple[str, str]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # 0 where a dim has one element
    start: int  # in bytes, from the first element of the origin
    flips: str = ""  # "conj", "neg": what is done to the elements as they are read


class Constant(NamedTuple):
    """An argument that is no value of the program, as a text by which it is told apart.

    text: as it is printed; "" for what one sees in the results, or what says nothing.
    """

    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledOp:
    """An op with its overload, "aten.add.Tensor", and its arguments, lists laid out flat."""

    op: str
    arguments: tuple[Operand | Constant, ...] = ()


def calls_of(program: RecordedStep, ops: Sequence[Op]) -> tuple[CalledOp, ...]:
    """Return the call of each op, and behind them a call "return PATH" for each output.

    ops: as `ops_of` makes them of the program.
    """
    nodes = list(program.graph.graph.nodes)
    reads = _Reads(program)
    calls = [
        CalledOp(op=str(node.target), arguments=tuple(_arguments(node, op.phase, reads)))
        for node, op in zip(filter(is_op, nodes), ops, strict=True)
    ]
    returned: Any = nodes[-1].args[0]
    for path, x in zip(program.outputs, returned, strict=True):
        calls.append(CalledOp(op=f"return {path}", arguments=(reads.of(x, "update"),)))
    return tuple(calls)


class _Reads:
    """Finds where the values of a graph come from."""

    def __init__(self, program: RecordedStep) -> None:
        nodes = list(program.graph.graph.nodes)
        self._graph: Any = program.graph
        self._names, self._flats = names_of(program), flats_of(program, events_of(program))
        self._paths = dict(zip(inputs_of(nodes), program.inputs, strict=True))
        self._digests: dict[str, str] = {}

    def of(self, node: fx.Node, phase: Phase) -> Operand:
        """Return what an op of a phase reads that has this node among its arguments."""
        x, root = node.meta["val"], root_of(node)
        first = root.meta["val"]
        origin, start = self._origin(root), 0
        if x.untyped_storage()._cdata == first.untyped_storage()._cdata:
            start = x.storage_offset() * x.itemsize - first.storage_offset() * first.itemsize
            origin, start = self._inside(x, root, phase) or (origin, start)
        return Operand(
            name=self._names[node],
            origin=origin,
            dtype=short(x.dtype),
            shape=tuple(x.shape),
            strides=tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)),
            start=start,
            flips=" ".join(["conj"] * x.is_conj() + ["neg"] * x.is_neg()),
        )

    def _origin(self, root: fx.Node) -> tuple[str, str]:
        if root.op == "placeholder":
            return "input", self._paths[root]
        if root.op != "get_attr":
            return "value", self._names[root]
        name = str(root.target)
        if name not in self._digests:
            self._digests[name] = tensor_key(operator.attrgetter(name)(self._graph))
        return "constant", self._digests[name]

    def _inside(self, x: Tensor, root: fx.Node, phase: Phase) -> tuple[tuple[str, str], int] | None:
        """Return (origin, start) of a part of the parameters that the step was given."""
        flat = self._flats.get(x.untyped_storage()._cdata)
        source = root
        args: Any = root.args
        if is_item(root) and args[0].target is torch.ops.fzero.all_gather.default:
            source = root_of(args[0].args[0][args[1]])
        if flat is None or not flat.is_whole or not is_params(self._paths.get(source, "")):
            return None
        if phase == "update" and flat.is_own_shard(x):  # the same on each rank
            return ("shard", self._paths[source]), 0
        found = flat.leaf_of(x)
        return found and (("parameter", found[0]), found[1])


_QUIET = {"dtype", "layout", "device", "pin_memory", "memory_format", "names"}
"""Arguments that one sees in the results, or that change no number."""


def _arguments(node: fx.Node, phase: Phase, reads: _Reads) -> Iterator[Operand | Constant]:
    """Yield the arguments of an op: positional ones, then keywords with their names."""
    target: Any = node.target
    schema = target._schema.arguments
    given = [(one, x) for one, x in zip(schema, node.args, strict=False)]
    given += [(one, node.kwargs[one.name]) for one in schema if one.name in node.kwargs]
    for one, x in given:
        if target is UPDATE and one.name in ("rule", "options"):
            pairs = json.loads(str(x)).items() if one.name == "options" else ()
            yield Constant(str(x), " ".join(f"{k}={v}" for k, v in pairs if v is not False))
        elif target is RATE and one.name == "number":
            number = int(str(x))
            fn = SCHEDULES[number]
            name = str(getattr(fn, "__qualname__", type(fn).__name__)).replace("<locals>.", "")
            facts = repr(facts_of(fn)[1]).encode()
            yield Constant(blake2b(facts, digest_size=6).hexdigest(), f"schedule={name}")
        else:
            shows = target.namespace != COLLECTIVES and one.name not in _QUIET
            named = not isinstance(one.type, torch.NumberType | torch.TensorType)
            if isinstance(x, fx.Node):
                yield reads.of(x, phase)
            elif isinstance(x, list | tuple) and any(isinstance(y, fx.Node) for y in x):
                yield Constant(f"{one.name}: {len(x)} values", "")
                for y in x:  # a value or, in an index, None for all of a dim
                    yield reads.of(y, phase) if isinstance(y, fx.Node) else Constant("None", ":")
            else:
                yield _constant(x, one.name, shows=shows, named=named)


def _constant(x: Any, name: str, *, shows: bool, named: bool) -> Constant:
    if isinstance(x, bool | int | float | complex):
        number = "max" if x == sys.maxsize else str(x)
        text = f"{name}={number}" if named else number
        return Constant(f"{name}={number_key(x)}", text if shows and x is not False else "")
    text = f"{name}={str(x).replace(' ', '')}" if shows and x is not None else ""
    return Constant(f"{name}={x}", text)


def number_key(x: float | complex | bool) -> str:
    """Return a text that numbers share if they are equal: 2 and 2.0 do, 0.0 and -0.0 do not.

    In which dtype an op computes is seen in what it gives.

    Example:
        >>> number_key(2) == number_key(2.0), number_key(0.0) == number_key(-0.0)
        (True, False)
    """
    if isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**53:
        return repr(float(x))
    return repr(x)


def tensor_key(x: Any) -> str:
    """Return the dtype, the shape and a digest of the values of a tensor.

    One without values, on the meta device or fake, has the digest "no values".

    Example:
        >>> tensor_key(torch.ones(2)) == tensor_key(torch.ones(2)), tensor_key(torch.ones(2))[:7]
        (True, 'f32[2] ')
    """
    with torch._C.DisableTorchFunctionSubclass():
        head = f"{short(x.dtype)}[{','.join(map(str, x.shape))}]"
        if isinstance(x, FakeTensor) or x.is_meta:
            return f"{head} no values"
    flat = x.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1)
    words = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return f"{head} {blake2b(words, digest_size=6).hexdigest()}"
