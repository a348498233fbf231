"""What is refused names the way that there is, changes nothing, and the way is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine, gathered
from fzero.errors import CallError, LayoutError, PhaseError
from tests.adapter.nets import Net, linear
from tests.adapter.on_ranks import Place, each_stage, virtually
from tests.adapter.plain import Draw, Reference, back, engine_of, same, update

stages = pytest.mark.parametrize("stage", [0, 2, 3])


@stages
def test_a_closure_is_called_by_its_owner(stage: int) -> None:
    e, plain = engine_of(Net, stage), Reference(Net, 1)

    def closure() -> Tensor:
        e.zero_grad()
        loss = e(Draw(0, 0)(2, 3)).square().sum()
        loss.backward()
        return loss

    before = e.full_parameters()
    for refused in (e.step, e.optimizer.step):
        with pytest.raises(CallError, match=r"(?s)function.*Fix: call `loss = closure\(\)`"):
            refused(closure)  # type: ignore
        with pytest.raises(CallError):
            refused(closure=closure)  # type: ignore
    same(e.full_parameters(), before, 0.0)
    assert closure().requires_grad and e.step()
    same(e.full_parameters(), plain.step(plain.run(back, 0)))


@virtually(2)
def test_parameters_of_stage_3_are_counted_by_themselves() -> None:
    e = engine_of(Net, 3)
    some = list(e.module.parameters())
    for count in (
        lambda: len({p.data_ptr() for p in some}),
        lambda: {p.detach().view(-1).data_ptr(): p.numel() for p in some},
    ):
        with pytest.raises(LayoutError, match=r"(?s)count .*module.parameters\(\)"):
            count()
    assert sum(p.numel() for p in some) == sum(p.numel() for p in Net().parameters())


MADE_OF: dict[str, Callable[[Any], Any]] = {
    "trace": lambda m: torch.jit.trace(m, torch.ones(2, 3).double()),
    "script": lambda m: torch.jit.script(m),
    "export": lambda m: torch.export.export(m, (torch.ones(2, 3).double(),)),
}


@virtually(2)
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("way", MADE_OF)
def test_programs_of_torch_are_made_of_a_closed_engine(at: Place, way: str) -> None:
    e, plain = Place(at.rank, 2, 3).both(Net)
    for of in (lambda: e.module, lambda: e.module.a):
        with pytest.raises((PhaseError, LayoutError, AttributeError), match=r"close\(\)"):
            MADE_OF[way](of())
    update(e, plain, at.rank, 0)
    e.close()
    assert MADE_OF[way](e.module.a) is not None


@virtually(2)
@stages
def test_a_new_head_is_added_between_two_engines(stage: int) -> None:
    module, plain = linear(3, 3), linear(3, 3)
    for one in (module, plain):
        nn.init.ones_(one.weight)
        nn.init.zeros_(one.bias)
    x = torch.ones(1, 3, dtype=torch.float64)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, plain))
    e = Engine(module, mine, stage=stage)
    for call, step in ((e, e.step), (plain, theirs.step)):
        call(x).square().sum().backward()
        step()
    head, other = linear(3, 1), linear(3, 1)
    for one in (head, other):
        nn.init.constant_(one.weight, 0.5)
        nn.init.zeros_(one.bias)
    mine.add_param_group({"params": list(head.parameters())})
    e(x).sum().backward()
    with pytest.raises(PhaseError, match=r"(?s)new head.*Fix: engine\.close\(\).*new Engine"):
        e.step()
    for change in (lambda some: some.append(head.weight), lambda some: some.pop()):
        mine.param_groups.pop() if len(mine.param_groups) > 1 else None
        some = mine.param_groups[0]["params"]
        kept = [*some]
        change(some)
        with pytest.raises(PhaseError, match=r"(?s)appended.*Fix: engine\.close\(\)"):
            e.step()
        some[:] = kept
    mine.add_param_group({"params": list(head.parameters())})
    e.close()
    e = Engine(nn.Sequential(module, head), mine, stage=stage)
    theirs.zero_grad()
    theirs.add_param_group({"params": list(other.parameters())})
    e(x).square().sum().backward()
    e.step()
    other(plain(x)).square().sum().backward()
    theirs.step()
    wanted = [*plain.parameters(), *other.parameters()]
    for p, q in zip(e.full_parameters().values(), wanted, strict=True):
        assert torch.allclose(p, q, rtol=1e-12)


def test_trainers_are_sent_to_what_is_made_for_them() -> None:
    e = engine_of(Net, 2)
    optimizer: Any = e.optimizer
    back(e, Draw(0, 0))
    names = r"(?s)sharded\(Trainer.*FzeroAccelerator.*FzeroStrategy"
    with pytest.raises(PhaseError, match=names):
        optimizer.state_dict()  # as Accelerator.prepare(), a Trainer
    with pytest.raises(AttributeError, match=names):  # a Trainer of an engine
        vars(nn.Module)["named_children"](e).__next__()
    with pytest.raises(PhaseError, match="a Trainer or an Accelerator"):  # with its own optimizer
        torch.optim.AdamW(e.module.parameters(), fused=True).step()
    assert not hasattr(e, "_modules") and e.step()


@virtually(2)
@each_stage
def test_inside_of_a_window_p_grad_says_that_it_is_not_reduced(stage: int) -> None:
    e = engine_of(Net, stage)
    for window in (e.no_sync, e.coalesce):
        with ExitStack() as stack:
            stack.enter_context(window())
            back(e, Draw(0, 0))
            g: Any = e.module.get_parameter("a.weight").grad
            for use in (g.clone, g.norm, g.tolist, lambda g=g: g.add_(1), lambda g=g: g.mul_(2)):
                with pytest.raises(PhaseError, match=r"(?s)inside a window.*Fix: leave the"):
                    use()
        assert g.norm() > 0


@virtually(2)
@each_stage
def test_gathered_writes_need_no_no_grad(stage: int) -> None:
    e = engine_of(Net, stage)
    a = e.module.get_parameter("a.weight")
    before = e.full_parameter("a.weight")
    with gathered(e.module, modify=True) as full:
        a.mul_(2.0)
        a[0] = 1.0
        full[1].zero_()
    assert torch.is_grad_enabled()
    before = before * 2
    before[0] = 1.0
    assert torch.equal(e.full_parameter("a.weight"), before)
    assert not e.full_parameter("a.bias").any()
    back(e, Draw(0, 0))
    assert e.step()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "reshard": lambda e: e.reshard(0),
    "step": lambda e: e.step(),
    "close": lambda e: e.close(),
    "engine.state": lambda e: setattr(e, "state", e.state),
    "load_state_dict": lambda e: e.load_state_dict(Net().state_dict()),
}


@virtually(2)
@stages
@pytest.mark.parametrize("where", ["before", "part", "part, before", "after"])
def test_what_replaces_parameters_is_refused_inside_of_a_forward(stage: int, where: str) -> None:
    at = Place(0, 1, stage)
    e, plain = at.both(Net)
    module: Any = e.module
    part = module.a if where.startswith("part") else module
    for number, (name, call) in enumerate(CALLS.items()):

        def hook(*_: Any, call: Callable[[Engine], Any] = call) -> None:
            call(e)

        add = part.register_forward_pre_hook if "before" in where else part.register_forward_hook
        handle = add(hook)
        with pytest.raises(PhaseError, match=f"(?s){name}.*inside a forward.*between steps"):
            e(Draw(0, number)(2, 3))
        handle.remove()
        update(e, plain, 0, number)
    e.reshard(2)
    update(e, plain, 0, 9)


@each_stage
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_dict_is_live_below_stage_3(stage: int, dtype: torch.dtype) -> None:
    module = Net().to(dtype)
    e = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
    own, wanted = e.state_dict(), module.get_parameter("a.weight").detach().clone()
    own["a.weight"].copy_(torch.full_like(wanted, 2.0))
    own["a.bias"].mul_(0)
    if stage < 3:
        wanted.fill_(2.0)
        assert not e.full_parameter("a.bias").any()
    assert torch.equal(module.get_parameter("a.weight"), wanted)
    e(Draw(0, 0)(2, 3, dtype=dtype)).sum().backward()
    wanted -= e.full_gradient("a.weight").to(dtype)
    assert e.step()
    assert torch.equal(module.get_parameter("a.weight"), wanted)  # masters had followed
    assert torch.equal(e.state_dict()["a.weight"], wanted)


def test_the_docstring_says_where_a_state_dict_is_a_copy() -> None:
    first = str(Engine.state_dict.__doc__).splitlines()[0]
    assert "live" in first and "at stage 3 a copy" in first
