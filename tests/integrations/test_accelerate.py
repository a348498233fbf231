"""Loops over accelerate: on ranks they give what plain PyTorch gives on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.adapter.on_ranks import on_ranks
from tests.integrations.launched import launched

TIER_INPUTS = ("fzero/integrations",)  # tests/tiers.py: a push that changes them runs these tests

pytest.importorskip("accelerate")

BATCHES, SIZE, STEPS = 6, 4, 2  # of samples on all ranks; backwards of an update
MAX_NORM = 0.5


def make() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.BatchNorm1d(3).eval())
    model[2].bias.requires_grad_(False)
    return model.double()


def data() -> Any:
    g = torch.Generator().manual_seed(1)
    return list(torch.randn(BATCHES * SIZE, 3, generator=g, dtype=torch.float64))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.1)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


class Loop:
    """The loop of accelerate's own documentation."""

    def __init__(self, stage: int | None, ranks: int, **options: Any) -> None:
        from accelerate import Accelerator

        from fzero.integrations.accelerate import FzeroAccelerator

        made: Any = {"cpu": True, "gradient_accumulation_steps": STEPS, **options}
        plain = stage is None
        self.accelerator = Accelerator(**made) if plain else FzeroAccelerator(stage=stage, **made)
        model, loader = make(), torch.utils.data.DataLoader(data(), batch_size=SIZE // ranks)
        optimizer = optimizer_of(model)
        # accelerate steps a scheduler once for each rank
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, ranks, 0.5)
        self.optimizer, self.model, self.loader, self.scheduler = self.accelerator.prepare(
            optimizer, model, loader, scheduler
        )
        self.norms: list[float] = []

    def run(self, begin: int = 0) -> list[float]:
        for number, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                if number < begin:
                    continue
                self.accelerator.backward(loss_of(self.model(batch)))
                if self.accelerator.sync_gradients:
                    clip = self.accelerator.clip_grad_norm_
                    self.norms.append(clip(self.model.parameters(), float("inf")).item())
                    clip(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self.norms

    def parameters(self) -> Any:
        return self.accelerator.get_state_dict(self.model)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.floor
@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2, timeout_s=200)
def test_the_loop_of_accelerate_trains_as_one_process_with_one_reduction_a_step(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with launched(0, 1):
        plain = Loop(None, 1)
        norms, wanted = plain.run(), plain.parameters()
    for stage in (0, 2, 3):
        with launched(rank, world_size):
            loop = Loop(stage, world_size)
            assert loop.accelerator.unwrap_model(loop.model) is loop.model
            with fzero.count_collectives() as log:
                assert loop.run() == pytest.approx(norms, rel=1e-11)
            same(loop.parameters(), wanted)
            assert loop.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
            sent = [e.numel for e in log.of() if e.op in ("all_reduce", "reduce_scatter")]
            engine = loop.accelerator.engines[0]
            layout = engine.state.setup.layout
            whole = sum(layout.full_numel(i) for i in layout.trainable)
            gradients = sum(numel for numel in sent if numel > 1)  # the norm is one number
            wanted_numel = whole * BATCHES // STEPS if world_size > 1 else 0
            assert gradients == wanted_numel, (stage, sent, whole)
            engine.close()


@on_ranks(2, timeout_s=200)
def test_a_saved_state_goes_on_at_another_stage_and_one_rank_saves_the_model(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    with launched(0, 1):
        plain = Loop(None, 1)
        wanted, last = plain.run(), plain.parameters()
    for saved, loaded in ((2, 3), (3, 0)):
        with launched(rank, world_size):
            loop = Loop(saved, world_size)
            loop.loader = [x for x, _ in zip(loop.loader, range(STEPS), strict=False)]
            loop.run()
            where = tmp_path / str(saved)
            loop.accelerator.save_state(str(where))
            with loop.accelerator.whole(loop.model):
                alone = {name: x.clone() for name, x in loop.model[2].state_dict().items()}
                with fzero.count_collectives() as log:  # one rank alone, as PEFT saves a prompt
                    made = loop.model[2](torch.eye(5).double()) if rank == 0 else None
                assert not log.of()
                if made is not None:
                    torch.testing.assert_close(made, alone["weight"].T + alone["bias"])
            loop.accelerator.save_model(loop.model, str(where))
            loop.accelerator.wait_for_everyone()
            same(load_file(where / "model.safetensors"), loop.parameters())
            same({f"2.{name}": x for name, x in alone.items()}, {
                name: x for name, x in loop.parameters().items() if name.startswith("2.")
            })  # fmt: skip
            loop.accelerator.engines[0].close()
        with launched(rank, world_size):
            loop = Loop(loaded, world_size)
            with loop.accelerator.whole(loop.model, modify=True), torch.no_grad():
                loop.model[0].weight.fill_(7.0)  # what is loaded replaces it
            loop.accelerator.load_state(str(where))
            assert loop.run(begin=STEPS) == pytest.approx(wanted[1:], rel=1e-11)
            same(loop.parameters(), last)
            loop.accelerator.engines[0].close()


@on_ranks(2, timeout_s=200)
def test_an_overflow_on_one_rank_skips_the_update_and_the_scheduler_on_all(
    rank: int, world_size: int
) -> None:
    with launched(rank, world_size):
        scale = fzero.DynamicScale(init_scale=8.0)
        loop = Loop(2, world_size, engine={"loss_scale": scale}, gradient_accumulation_steps=1)
        begin, rate = loop.parameters(), loop.scheduler.get_last_lr()
        factor = float("inf") if rank == 1 else 1.0
        loop.accelerator.backward(loss_of(loop.model(torch.ones(2, 3).double())) * factor)
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        assert loop.accelerator.optimizer_step_was_skipped
        assert loop.scheduler.get_last_lr() == rate
        same(loop.parameters(), begin)
        loop.accelerator.backward(loss_of(loop.model(torch.ones(2, 3).double())))
        loop.optimizer.step()
        assert not loop.accelerator.optimizer_step_was_skipped
        loop.accelerator.engines[0].close()


@on_ranks(2, timeout_s=200)
def test_bf16_is_computed_in_the_forward_and_comes_out_in_fp32(rank: int, world_size: int) -> None:
    from fzero.integrations.accelerate import FzeroAccelerator

    with launched(rank, world_size):
        accelerator = FzeroAccelerator(cpu=True, stage=3, mixed_precision="bf16")
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        model = accelerator.prepare(model)  # in two calls
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        model[1].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        assert model(torch.ones(2, 3)).dtype is torch.float32
        assert seen == [torch.bfloat16]
        accelerator.engines[0].close()


def refusals(loop: Loop) -> dict[str, Any]:
    """What a script of another backend does, by the words of the error that it gets."""
    accelerator, model = loop.accelerator, loop.model
    other, third = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*other.parameters(), *third.parameters()], lr=0.1)
    return {
        "optimizer was not set up": lambda: accelerator.prepare(other)(torch.ones(1, 2)),
        "are not all of one model, of the 2": lambda: accelerator.prepare(third, both),
        "are not all of one model": lambda: accelerator.prepare(type(both)(model.parameters())),
        "gradient_accumulation": lambda: Loop(2, 1, engine={"gradient_accumulation_steps": 2}),
        "stage=4": lambda: Loop(4, 1),
        "closure": lambda: loop.optimizer.step(lambda: 1.0),
    }


@on_ranks(2, timeout_s=200)
def test_a_part_of_a_model_another_norm_and_values_are_clipped_as_torch_does(
    rank: int, world_size: int
) -> None:
    from fzero.integrations.accelerate import FzeroAccelerator

    with launched(rank, world_size):
        accelerator, model = FzeroAccelerator(stage=2, cpu=True), nn.Linear(3, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine = accelerator.engines[0]
        accelerator.backward(model(torch.full((1, 3), 2.0 + rank)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 9.0, norm_type=1) == 17.0
        before = engine.full_gradients()
        assert accelerator.clip_grad_norm_([model.bias], 0.5) == before["bias"].norm()
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        after = engine.full_gradients()
        assert torch.equal(after["weight"], before["weight"].clamp(-1.0, 1.0))
        assert torch.allclose(after["bias"].norm(), torch.tensor(0.5))
        engine.close()


@on_ranks(2, timeout_s=200)
def test_what_another_backend_does_is_refused_by_name(rank: int, world_size: int) -> None:
    with launched(rank, world_size):
        loop = Loop(2, world_size)
        for words, attempt in refusals(loop).items():
            with pytest.raises(LayoutError, match=words):
                attempt()
        given = {"state": {}, "param_groups": []}
        for attempt in (loop.optimizer.state_dict, lambda: loop.optimizer.load_state_dict(given)):
            with pytest.raises(PhaseError, match="that an engine runs"):
                attempt()
        loop.run()  # nothing was changed
        loop.accelerator.engines[0].close()


@on_ranks(3, timeout_s=200)
def test_weighted_losses_give_the_mean_over_the_tokens_of_all_ranks_and_micro_batches(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from fzero.integrations.accelerate import FzeroAccelerator

    counts = [3, 1, 0, 7, 2, 5]  # of rows: of micro-batch n on rank r, at 3 n + r
    rows = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(2)).double()
    plain = make()
    loss_of(plain(rows)).backward()
    wanted = [p.grad for p in plain.parameters() if p.grad is not None]
    for stage in (0, 3):
        with launched(rank, world_size):
            accelerator = FzeroAccelerator(cpu=True, stage=stage, gradient_accumulation_steps=2)
            model = make()
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
            model, optimizer = accelerator.prepare(model, optimizer)
            begin = accelerator.get_state_dict(model)
            for part in torch.split(rows, counts)[rank::3]:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model(part)), weight=len(part))  # one: of none
                    optimizer.step()
            after = accelerator.get_state_dict(model)
            moved = [begin[name] - after[name] for name, p in make().named_parameters()
                     if p.requires_grad]  # fmt: skip
            torch.testing.assert_close(moved, wanted, rtol=1e-11, atol=1e-11)
            accelerator.engines[0].close()
            with pytest.raises(LayoutError, match="a weight, and 0 models that learn"):
                FzeroAccelerator(cpu=True, stage=stage).backward(torch.ones(()), weight=1)
