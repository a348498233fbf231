"""Run recorded programs with numbers, all ranks in turn: the truth about a mutant."""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fzero.tools.prove.read import BufferPlace, places_of
from fzero.tools.trace.program import RecordedStep

Send = tuple[str, list[Tensor], int]


def outputs(programs: Sequence[RecordedStep], seed: int) -> dict[Any, list[Tensor]] | str:
    """The leaves of the new state on all ranks; or why the ranks cannot run these programs."""
    runs = [_run(one, _inputs(one, seed)) for one in programs]
    sent: list[Any] = [next(run) for run in runs]
    while all(isinstance(one, tuple) for one in sent):
        if len({(name, size, len(xs)) for name, xs, size in sent}) > 1:
            return "other collectives"
        answers = _collective(*sent[0][::2], [xs for _, xs, _ in sent])
        sent = [run.send(answer) for run, answer in zip(runs, answers, strict=True)]
    if any(isinstance(one, tuple) for one in sent):
        return "other collectives"
    return _by_leaf(programs[0], sent)


def _run(program: RecordedStep, inputs: Sequence[Tensor]) -> Generator[Any, Any, None]:
    known: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in program.graph.graph.nodes:
        args, kwargs = tree_map(
            lambda x: known[x] if isinstance(x, fx.Node) else x, (node.args, node.kwargs)
        )
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "output":
            yield list(args[0])
        elif node.op == "get_attr":
            known[node] = getattr(program.graph, node.target)
        elif getattr(node.target, "namespace", "") == "fzero":
            name = node.target._schema.name.split("::")[1]
            known[node] = yield name, list(args[0]), args[3]
        else:
            known[node] = node.target(*args, **kwargs)
            if node.target is not operator.getitem and "empty" in node.target._schema.name:
                known[node].fill_(float("nan"))


def _collective(name: str, size: int, every: list[list[Tensor]]) -> list[list[Tensor]]:
    assert size == len(every)
    found: list[list[Tensor]] = [[] for _ in every]
    for xs in zip(*every, strict=True):
        if name == "all_gather":
            made = [torch.cat(xs)] * size
        else:
            total = torch.stack(xs).sum(0)
            made = [total] * size if name == "all_reduce" else list(total.chunk(size))
        for mine, x in zip(found, made, strict=True):
            mine.append(x.clone())
    return found


def _inputs(program: RecordedStep, seed: int) -> list[Tensor]:
    nodes = [node for node in program.graph.graph.nodes if node.op == "placeholder"]
    places = places_of(program, program.inputs, nodes)
    return [_input(*pair, program.rank, seed) for pair in zip(places, nodes, strict=True)]


def _input(place: BufferPlace, node: fx.Node, rank: int, seed: int) -> Tensor:
    val = node.meta["val"]
    name = place.kind if place.kind.startswith("state") else f"{place.kind} of {rank}"
    if place.setup is None:
        return _drawn(name, tuple(val.shape), val.dtype, seed)
    full = _drawn(
        f"{name} {place.group}", (place.setup.layout.full_numel(place.group),), val.dtype, seed
    )
    return full[rank * val.numel() :][: val.numel()].clone() if place.spread else full


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(ord(c) * i for i, c in enumerate(name, 1)))
    if dtype is torch.bool:
        return torch.zeros(shape, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.full(shape, len(name), dtype=dtype)  # counts that are not told apart are alike
    return (
        torch.rand(shape, generator=generator).mul(2).sub(0 if "optimizer" in name else 1).to(dtype)
    )


def _by_leaf(program: RecordedStep, sent: list[list[Tensor]]) -> dict[Any, list[Tensor]]:
    ends = list(list(program.graph.graph.nodes)[-1].args[0])
    found: dict[Any, list[Tensor]] = {}
    for place, values in zip(
        places_of(program, program.outputs, ends), zip(*sent, strict=True), strict=True
    ):
        if place.setup is None:
            if place.kind.startswith("state"):
                found[place.kind] = list(values)
            continue
        flats = [torch.cat(values)] if place.spread else list(values)
        for path, start, numel in place.leaves:
            found[place.kind, path] = [flat[start : start + numel] for flat in flats]
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two new states are equal but for rounding."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    pairs = [pair for key in a for pair in zip(a[key], b[key], strict=True)]
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for x, y in pairs
    )
