"""The printed graph: modules, parameters and parts by name, and no line that says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from tests.descends import descends

D = 8


class Attention(nn.Module):
    """With one projection, or three of them."""

    def __init__(self, joined: bool, bias: bool = True) -> None:
        super().__init__()
        names = ("qkv",) if joined else ("q", "k", "v")
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(D, (3 if joined else 1) * D, bias=bias))
        self.out = nn.Linear(D, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made = [getattr(self, name)(x) for name in self.names]
        q, k, v = made if len(made) == 3 else made[0].split(D, -1)
        q, k, v = (part.view(*x.shape[:2], 2, D // 2).transpose(1, 2) for part in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, joined: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.attn = Attention(joined)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        again = self.checkpointed
        return self.mlp(checkpoint(self.attn, x, use_reentrant=False) if again else self.attn(x))


def traced(model: nn.Module, stage: int, world: int = 2, **options: Any) -> Any:
    apply, params = fzero.functionalize(model)

    step_fn = descends(lambda p, x: apply(p, x).pow(2).mean())
    step = fzero.simulate(fzero.shard(step_fn, stage=stage, **options), world_size=world)
    return fzero.trace(step)(step.init(params, fzero.optim.adamw(0.1)), torch.zeros(world, 2, 3, D))


def lines_of(trace: Any, phase: str, op: str) -> list[str]:
    """The lines of one op in one phase, without what it gives."""
    lines = str(trace).splitlines()
    phases = ("forward", "backward", "update", "outputs")
    start, stop = lines.index(phase), lines.index(phases[phases.index(phase) + 1])
    read = [line.partition(" = ")[2] for line in lines[start:stop] if " = " in line]
    return [" ".join(line.split()) for line in read if line.split()[0] == op]


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 2), (2, 2), (3, 2)])
def test_parameters_are_read_by_their_paths_in_their_modules(stage: int, world: int) -> None:
    trace = traced(Block(joined=False), stage, world)
    found = lines_of(trace, "forward", "addmm")
    assert [line.split()[1] for line in found] == [
        "attn.q.bias", "attn.k.bias", "attn.v.bias", "attn.out.bias", "mlp.0.bias"
    ]  # fmt: skip
    assert [line.split()[3:] for line in found] == [
        [f"{name}.weight", "#", name]
        for name in ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.0")
    ]
    gelu = lines_of(trace, "forward", "gelu")
    assert [line.split()[2:] for line in gelu] == [["#", "mlp.1"]]
    (attention,) = lines_of(trace, "forward", "_scaled_dot_product_flash_attention_for_cpu")
    read = attention.split()
    assert len(set(read[1:4])) == 3 and read[4:] == ["#", "attn"]
    # The gradient of an input reads the weight; each line of a backward has its module, too.
    products = lines_of(trace, "backward", "mm")
    assert any(line.endswith("mlp.0.weight # mlp.0") for line in products)
    assert {line.split("# ")[1] for line in products} == {
        "attn.q", "attn.k", "attn.v", "attn.out", "mlp.0"
    }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 3])
def test_parts_of_one_projection_are_told_apart(stage: int) -> None:
    trace = traced(Block(joined=True), stage)
    (attention,) = lines_of(trace, "forward", "_scaled_dot_product_flash_attention_for_cpu")
    q, k, v = attention.split()[1:4]
    name = q.removesuffix("[0]")
    assert (q, k, v) == (f"{name}[0]", f"{name}[1]", f"{name}[2]")
    (made,) = [op for op in trace.ops if any(value.name == name for value in op.gives)]
    assert made.name == "addmm" and made.detail == "attn.qkv"


def test_parts_that_are_cut_out_say_which_ones_they_are() -> None:
    model = nn.MultiheadAttention(D, 2, batch_first=True)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0] + x[:, 1:, 2].sum() + x[0].sum()

    trace = traced(Own(), 2)
    (attention,) = lines_of(trace, "forward", "_scaled_dot_product_flash_attention_for_cpu")
    q, k, v = attention.split()[1:4]
    assert [part[-3:] for part in (q, k, v)] == ["[0]", "[1]", "[2]"]
    assert {line.split("[", 1)[1] for line in lines_of(trace, "forward", "sum")} == {
        ":, 1:][:, :, 2] # Own", "0] # Own"
    }  # fmt: skip


def test_what_a_checkpoint_recomputes_is_in_its_module() -> None:
    trace = traced(Block(joined=False, checkpointed=True), 3)
    again = lines_of(trace, "backward", "addmm")
    assert [line.split("# ")[1] for line in again] == ["attn.q", "attn.k", "attn.v"]


def test_what_says_nothing_has_no_line() -> None:
    trace = traced(Block(joined=False), 2)
    lines = str(trace).splitlines()
    assert any(op.name == "ones_like" for op in trace.ops)
    assert not any(" ones_like" in line or "_unsafe_view" in line for line in lines)
    assert "div ones" in str(trace) or "expand ones" in str(trace) or " ones" in str(trace)
    assert any(value.path.endswith("masters[0]") for value in trace.inputs)
    assert not any("masters" in line for line in lines)  # there are none: they have no element
    assert all(len(line) < 160 for line in lines)


def test_a_value_that_is_written_into_is_not_called_what_it_was_filled_with() -> None:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        made = torch.zeros_like(x)
        made.copy_(x)
        return state, made.cumsum(0)

    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0)
    text = str(fzero.trace(step_fn)(state, torch.ones(3)))
    assert "zeros_like" in text and "cumsum zeros" not in text


def test_fifty_layers_fit_into_a_terminal() -> None:
    trace = traced(nn.Sequential(*(nn.Linear(D, D) for _ in range(50))), 2)
    lines = str(trace).splitlines()
    assert max(map(len, lines)) < 160
    stars = [line for line in lines if line.startswith("  * ")]
    assert all("<dp: 0.weight, 0.bias +98>" in line for line in stars) and len(stars) == 2
    assert len(trace.ops[-1].detail) < 1000


def test_two_states_have_the_names_of_each() -> None:
    def step_fn(states: Any, x: Tensor) -> tuple[Any, Tensor]:
        def loss(p: Any, x: Tensor) -> Tensor:
            return (x @ p["g"]["up"] @ p["d"]["down"]).sum()

        states, value = fzero.grad_and_reduce(loss, states)(x)
        return fzero.apply_gradients(states), value

    for stage in (2, 3):
        step = fzero.simulate(fzero.shard(step_fn, stage={"g": stage, "d": 0}), world_size=2)
        params = {"g": {"up": torch.ones(D, 4)}, "d": {"down": torch.ones(4, D)}}
        states = step.init(params, fzero.optim.sgd(0.1))
        trace = fzero.trace(step)(states, torch.zeros(2, 3, D))
        assert [line.split()[2] for line in lines_of(trace, "forward", "mm")] == ["up", "down"]
