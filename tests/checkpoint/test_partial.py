"""`load(strict=False, rename=)`: a checkpoint of another model, against plain PyTorch.

What is in both has the saved values and moments, rows of another size too; the rest is as it was
made, and counts from 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import export_safetensors, import_safetensors, load, save
from fzero.errors import LayoutError
from tests.checkpoint.states import ADAM, make, on_ranks, train
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import on_rank, same

NAMES = {"head": "out"}


def net(rows: int, head: str, *, width: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    named = [("embed", nn.Embedding(rows, width)), ("norm", nn.BatchNorm1d(width))]
    return nn.Sequential(OrderedDict([*named, (head, nn.Linear(width, 2))]))


def loss(module: nn.Module, step: int) -> Tensor:
    return module(torch.tensor([1, 3, 0, step])).square().sum()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.125),
    "nadam": partial(torch.optim.NAdam, lr=0.125),  # its products of momenta are counters, too
    "adagrad": partial(torch.optim.Adagrad, lr=0.125, initial_accumulator_value=0.5),
    "sgd": partial(torch.optim.SGD, lr=0.125, momentum=0.5),
}


def plain(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()


def taken(new: Tensor, old: Tensor) -> None:
    """Copy what is in both."""
    box = tuple(slice(min(a, b)) for a, b in zip(new.shape, old.shape, strict=True))
    new[box] = old[box]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("rows", "width"), [(7, 3), (4, 2), (6, 4)])
def test_a_step_after_a_partial_load_is_that_of_torch(
    stage: int, optimizer: str, rows: int, width: int, tmp_path: Path
) -> None:
    made = OPTIMIZERS[optimizer]
    engine = Engine(first := net(5, "head"), made(first.parameters()), stage=stage)
    for step in range(2):
        engine.backward(loss(engine.module, step))
        engine.step()
    save(tmp_path, engine)
    into = net(rows, "out", width=width, seed=1)
    engine, report = load(
        tmp_path, Engine(into, made(into.parameters()), stage=stage), strict=False
    )
    resized = [] if (rows, width) == (5, 3) else ["embed.weight"]
    norm = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    assert report.missing == ["out.weight", "out.bias"]
    assert report.unexpected == ["head.weight", "head.bias"]
    assert [*report.resized] == resized + (norm if width != 3 else [])

    old = net(5, "head")
    plain(old, theirs := made(old.parameters()), range(2))
    new = net(rows, "out", width=width, seed=1)
    ours, of = made(new.parameters()), dict(old.named_parameters())
    with torch.no_grad():
        for name, p in new.named_parameters():
            if name not in of:
                continue
            taken(p, of[name])
            if optimizer != "adagrad":  # which has a state from the beginning
                ours.state[p] = {
                    k: x.clone() if x.ndim == 0 else torch.zeros_like(p)
                    for k, x in theirs.state[of[name]].items()
                }
            for k, x in theirs.state[of[name]].items():
                if x.ndim:
                    taken(ours.state[p][k], x)
                else:
                    ours.state[p][k].copy_(x)
        for name, x in new.named_buffers():
            taken(x, y) if (y := dict(old.named_buffers())[name]).ndim else x.copy_(y)
    engine.backward(loss(engine.module, 2))
    engine.step()
    plain(new, ours, range(2, 3))
    found = engine.full_state_dict()
    for name, x in new.state_dict().items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)  # kernels round apart


RULES: dict[str, Any] = {
    "adam": ADAM,
    "of 8 bits": fzero.optim.adamw(0.125, state_dtype=fzero.codecs.dynamic8(block=4)),
    "muon": fzero.optim.partition(
        {"m": fzero.optim.muon(0.125), "rest": ADAM},
        lambda leaf: "m" if len(leaf.shape) == 2 else "rest",
    ),
}


def params(rows: int, head: str, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    named = {"embed": (rows, 3), "w": (5, 3), "b": (3,), head: (4,)}
    return {name: torch.randn(shape, generator=g) for name, shape in named.items()}


def whole(state: Any) -> dict[str, Tensor]:
    """Values and moments by name, of rank 0."""

    def read(state: Any) -> dict[str, Any]:
        return {"params": dict(fzero.full_params(state)), **fzero.slots(state, "optimizer")}

    found = on_ranks(read, state)
    found = on_rank(found, 0) if state.step.ndim else found
    return {f"{k}/{name}": x for k, some in found.items() for name, x in dict(some).items()}


@covered(rule=[*RULES], stage=range(4), ranks=[1, 2, 3], then=[1, 2, 3])
def test_rows_keep_values_and_moments_on_any_ranks(
    rule: str, stage: int, ranks: int, then: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("partial")
    make_one = partial(make, stage=stage, optimizer=RULES[rule])
    old = on_ranks(train, make_one(params(5, "head", 0), ranks=ranks), 2)
    save(path, old)
    like = make_one(params(8, "new", 1), ranks=then)
    made, report = load(path, like, strict=False)
    assert report == (["new"], ["head"], ["embed"])
    full, saved = (on_rank(on_ranks(fzero.full_params, x), 0) for x in (made, old))
    assert torch.equal(full["embed"][:5], saved["embed"])
    assert torch.equal(full["embed"][5:], params(8, "new", 1)["embed"][5:])
    assert torch.equal(full["new"], params(8, "new", 1)["new"]) and torch.equal(
        full["b"], saved["b"]
    )
    renamed, report = load(
        path,
        make_one(params(5, "new", 1), ranks=then),
        strict=False,
        rename=lambda name: {"head": "new"}.get(name, name),
    )
    assert not any(report)
    full = on_rank(on_ranks(fzero.full_params, renamed), 0)
    assert torch.equal(full["new"], saved["head"])
    after = on_ranks(train, made, 1)  # and it goes on
    assert after.step.reshape(-1)[0] == 3


def test_what_learns_only_here_has_masters_of_what_was_loaded(tmp_path: Path) -> None:
    def state(frozen: bool, seed: int) -> Any:
        torch.manual_seed(seed)
        values = {k: torch.randn(3).bfloat16() for k in ("a", "b")}
        learns = (lambda name: name == "b") if frozen else None
        return fzero.init(values, ADAM, stage=1, trainable=learns)

    old = state(True, 0)
    save(tmp_path, old)
    made, report = load(tmp_path, state(False, 1), strict=False)
    assert not any(report)
    same(fzero.full_params(made), fzero.full_params(old))
    assert torch.equal(whole(made)["masters/a"], fzero.full_params(old)["a"].float())
    back = tmp_path / "back"
    save(back, made)
    same(fzero.full_params(load(back, state(True, 1), strict=False)[0]), fzero.full_params(old))


def test_a_group_of_new_parameters_has_its_own_options(tmp_path: Path) -> None:
    def engine(rate: float, head: str) -> Engine:
        one = net(5, head)
        groups = [
            {"params": [*one.embed.parameters(), *one.norm.parameters()], "lr": rate},
            {"params": [*getattr(one, head).parameters()], "lr": 2 * rate},
        ]
        return Engine(one, torch.optim.AdamW(groups), stage=1)

    save(tmp_path, engine(0.5, "head"))
    made, _ = load(tmp_path, engine(0.125, "out"), strict=False)
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.5, 0.25]
    rename = lambda name: name.replace("head.", "out.")  # noqa: E731
    made = load(tmp_path, engine(0.125, "out"), rename=rename)
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.5, 1.0]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def state(values: dict[str, Tensor], rule: Any = ADAM) -> Any:
        return fzero.init(values, rule, stage=1)

    w = torch.ones(3, 2)
    save(tmp_path, state({"w": w, "b": torch.ones(2)}))
    for into, words in (
        (state({"x.w": w, "x.b": w}), r"nothing in .* has the name .*\n.*\nFix: give rename="),
        (state({"w": w.double()}), r"w: \(3, 2\) torch.float32 .*, \(3, 2\) torch.float64"),
        (state({"w": w[0]}), r"w: \(3, 2\) torch.float32 .*, \(2,\) torch.float32"),
        (state({"w": w}, fzero.optim.sgd(0.5)), "the rule: adam in the checkpoint, sgd here"),
    ):
        with pytest.raises(LayoutError, match=words):
            load(tmp_path, into, strict=False)
    with pytest.raises(LayoutError, match="w and b of the checkpoint are both to be w"):
        load(tmp_path, state({"w": w}), strict=False, rename=lambda name: "w")
    with pytest.raises(LayoutError, match="returned a int"):
        load(tmp_path, state({"w": w}), strict=False, rename=lambda name: 1)  # type: ignore


@pytest.mark.parametrize("stage", [0, 3])
def test_safetensors_of_another_model(stage: int, tmp_path: Path) -> None:
    def engine(rows: int, head: str, seed: int) -> Engine:
        one = net(rows, head, seed=seed)
        return Engine(one, torch.optim.SGD(one.parameters(), lr=0.5), stage=stage)

    export_safetensors(tmp_path, old := engine(5, "head", 0))
    into, report = import_safetensors(tmp_path, engine(7, "out", 1), strict=False)
    assert report == (["out.weight", "out.bias"], ["head.bias", "head.weight"], ["embed.weight"])
    saved, found, first = (x.full_state_dict() for x in (old, into, engine(7, "out", 1)))
    assert torch.equal(found["embed.weight"][:5], saved["embed.weight"])
    assert torch.equal(found["embed.weight"][5:], first["embed.weight"][5:])
    assert torch.equal(found["out.weight"], first["out.weight"])
    rename = lambda name: name.replace("head.", "out.")  # noqa: E731
    into = import_safetensors(tmp_path, engine(5, "out", 1), rename=rename)
    assert torch.equal(into.full_state_dict()["out.weight"], saved["head.weight"])


def _loads(rank: int, size: int, path: str, stage: int) -> dict[str, Tensor]:
    state = fzero.init(params(8, "new", 1), ADAM, stage=stage)
    made, report = load(path, state, strict=False)
    assert report == (["new"], ["head"], ["embed"])
    return whole(on_ranks(train, made, 1))


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [1, 3])
def test_processes_load_what_one_process_does(stage: int, tmp_path: Path) -> None:
    save(tmp_path, train(fzero.init(params(5, "head", 0), ADAM, stage=0), 2))
    like = fzero.simulate(fzero.shard(lambda state: (state, None), stage=stage), world_size=2).init(
        params(8, "new", 1), ADAM
    )
    wanted = whole(on_ranks(train, load(tmp_path, like, strict=False)[0], 1))
    for found in run_ranks(_loads, 2, str(tmp_path), stage):
        same(found, wanted)
