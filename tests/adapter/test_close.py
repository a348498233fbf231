"""What an engine gives back when it is closed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.errors import PhaseError
from tests.adapter.nets import Odd, Tied
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import (
    Draw,
    adamw_of,
    back,
    engine_of,
    gradients_of,
    learning,
    mean,
    same,
    seeded,
    update,
)
from tests.optim.torch_cases import GroupAdam


def hooks_on(module: nn.Module) -> dict[str, int]:
    """How many hooks there are of each kind, on modules and on parameters."""
    found: dict[str, int] = {}
    for part in module.modules():
        for kind, hooks in vars(part).items():
            if "hooks" in kind and hooks:
                found[kind] = found.get(kind, 0) + len(hooks)
    for p in module.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            count = len(getattr(p, kind, None) or ())
            if count:
                found[kind] = found.get(kind, 0) + count
    return found


def saved_bytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer().nbytes


def adamw_class(module: nn.Module) -> Any:
    return torch.optim.AdamW


def counts_in_its_group(module: nn.Module) -> GroupAdam:
    return GroupAdam(learning(module).values())


@at_places(1, 2, 3)
@pytest.mark.parametrize("optimizer_of", [adamw_of, adamw_class, counts_in_its_group])
def test_after_close_plain_training_goes_on_as_if_there_had_been_no_engine(
    at: Place, optimizer_of: Any
) -> None:
    def plain_of(module: nn.Module) -> torch.optim.Optimizer:
        made = optimizer_of(module)
        return made(learning(module).values()) if isinstance(made, type) else made

    reference = at.plain(Odd, plain_of)
    module: Any = seeded(Odd)
    module.c.register_forward_hook(lambda *_: None)  # the user's own stays
    before = hooks_on(module)
    alone = {path: saved_bytes(p) for path, p in module.named_parameters()}
    engine = Engine(module, optimizer_of(module), stage=at.stage)
    for number in range(2):
        update(engine, reference, at.rank, number, tol=1e-9)
    back(engine, at.draw(9))  # lost
    optimizer: Any = engine.optimizer
    engine.close()
    engine.close()
    assert hooks_on(module) == before
    for path, p in module.named_parameters():
        assert type(p) is nn.Parameter and p.is_leaf and p.grad is None, path
        assert p.requires_grad == (path != "fixed"), path
        assert saved_bytes(p) <= alone[path] + 64, f"{path} shares memory"
    same(dict(module.named_parameters()), reference.parameters(), 1e-9)
    for number in range(2, 4):  # the plain module, with its optimizer, on the data of all ranks
        ranks = []
        for other in range(at.ranks):
            module.zero_grad()
            back(module, Draw(other, number))
            ranks.append(gradients_of(module))
        for path, gradient in mean(ranks).items():
            module.get_parameter(path).grad = gradient if gradient.any() else None  # unused
        optimizer.step()
        wanted = reference.step(reference.run(back, number))
        same(dict(module.named_parameters()), wanted, 1e-9)
    plain: Any = reference.optimizer
    theirs, ours = plain.state[reference.module.c.weight], optimizer.state[module.c.weight]
    assert {name: type(x) for name, x in theirs.items()} == {n: type(x) for n, x in ours.items()}


def cross_entropy(e: Any, draw: Draw) -> None:
    ids = draw.whole(5, dtype=torch.int64) + 3
    nn.functional.cross_entropy(e(ids), ids).backward()


@at_places(1, 2)
@pytest.mark.parametrize("second", [0, 3])
def test_a_module_may_have_one_engine_after_another_and_what_was_tied_stays_tied(
    at: Place, second: int
) -> None:
    reference, module = at.plain(Tied), seeded(Tied)
    for number, chosen in enumerate((at.stage, second)):
        engine = engine_of(lambda: module, chosen)
        update(engine, reference, at.rank, number, cross_entropy)
        cross_entropy(engine, at.draw(9))  # lost
        engine.close()
        tied: Any = module
        assert tied.head.weight is tied.embedding.weight
        assert tied.decoder.weight is tied.encoder.weight
        assert all(type(p) is nn.Parameter for p in module.parameters())


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@at_places(1, 2)
def test_a_part_is_frozen_from_some_update_on_by_another_engine_with_the_states_of_the_first(
    at: Place,
) -> None:
    plain, module = seeded(two_layers), seeded(two_layers)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine = Engine(module, optimizer, stage=at.stage)
    for number in range(4):
        if number == 2:
            engine.close()
            for net in (plain, module):
                net[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
            paths = dict(module.named_parameters())
            slots = {path: optimizer.state.pop(p) for path, p in paths.items()}
            engine = Engine(module, optimizer, stage=at.stage)
            for path in ("2.weight", "2.bias"):
                for name, value in slots[path].items():
                    engine.set_full_optimizer_state(path, name, value)
        for other in range(at.ranks):
            (plain(Draw(other, number)(4, 3)).square().mean() / at.ranks).backward()
        adam.step()
        adam.zero_grad()
        engine(at.draw(number)(4, 3)).square().mean().backward()
        engine.step()
        same(engine.full_state_dict(), dict(plain.named_parameters()), 1e-9)


@on_ranks(2)
def test_a_backward_through_a_forward_from_before_says_so(rank: int) -> None:
    module = two_layers()
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=3)
    weight = next(module.parameters())
    out = engine(torch.ones(2, weight.shape[1], dtype=weight.dtype)).sum()
    engine.close()
    with pytest.raises(PhaseError, match=r"before engine.close\(\)"):
        out.backward()
