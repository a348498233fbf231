"""Each leaf has counters of its own, as in torch.optim: updates that leave some leaves out."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import load, load_universal, save, save_universal
from fzero.errors import LayoutError
from fzero.optim import from_torch
from fzero.state.setup import Offload
from fzero.transforms.update import update
from tests.covering import covered
from tests.optim.torch_cases import GroupAdam

SHAPES = {"a": (3, 5), "b": (7,), "c": (4,), "d": (2, 3), "e": ()}
LEFT = (("b",), (), ("b", "d"), ("a", "b", "c", "d", "e"), ("c",), ("d",), ())
DOUBLE = torch.float64

Values = dict[str, Tensor]


def values(seed: int, dtype: torch.dtype = DOUBLE) -> Values:
    """Numbers of 1/8, so that sums over ranks are exact."""
    torch.manual_seed(seed)
    return {k: torch.randint(-16, 17, shape).to(dtype) / 8 for k, shape in SHAPES.items()}


GRADS = [values(1 + k) for k in range(len(LEFT))]


def by_torch(make: Callable[..., Any], steps: Sequence[int], dtype: torch.dtype = DOUBLE) -> Values:
    """torch.optim in one process, where a parameter that is left out has no gradient."""
    params = {path: nn.Parameter(x) for path, x in values(0, dtype).items()}
    optimizer = make(params.values())
    for k in steps:
        for path, p in params.items():
            p.grad = None if path in LEFT[k] else GRADS[k][path].to(dtype)
        optimizer.step()
    return {path: p.detach() for path, p in params.items()}


def stepped(state: Any, steps: Sequence[int], *, donate: bool = False) -> Any:
    """The same by fzero's update, on these ranks."""
    order = [leaf.path for leaf in state.setup.layout.leaves]
    for k in steps:
        grads = GRADS[k]

        def loss(p: Any, grads: Values = grads, left: Sequence[str] = LEFT[k]) -> Tensor:
            used = [(x * grads[path]).sum() for path, x in p.items() if path not in left]
            return torch.stack([*used, 0.0 * p["a"].sum()]).sum()

        state = fzero.grad_and_reduce(loss, state)()[0].replace_policy(donate=donate)
        state = update(state, [order.index(path) for path in LEFT[k]])[0]
    return state.replace_policy(donate=False)


def on_ranks(body: Callable[[], Any], ranks: int) -> Any:
    if ranks == 1:
        return body()
    found = fzero.simulate(lambda _: body(), world_size=ranks)(torch.zeros(ranks))
    return {path: x[0] for path, x in found.items()}


def close(got: Values, want: Values, atol: float = 1e-13) -> None:
    for path, x in want.items():
        torch.testing.assert_close(got[path].to(x.dtype), x, rtol=0.0, atol=atol, msg=path)


def momentum() -> tuple[Any, Any]:
    def rule(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        buf = [0.9 * m + g for m, g in zip(state["mu"], grads, strict=True)]
        return [-0.1 * m for m in buf], {"mu": buf, "count": state["count"] + 1}

    def init(params: Any) -> Any:
        return {"mu": [torch.zeros_like(p) for p in params], "count": torch.zeros(())}

    return init, rule


ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (ADAMW, None),
    "amsgrad": (partial(torch.optim.Adam, lr=torch.tensor(0.1), amsgrad=True), None),
    "nadam": (partial(torch.optim.NAdam, lr=0.1), None),
    "asgd": (partial(torch.optim.ASGD, lr=0.1, t0=1, weight_decay=0.1), None),
    "sgd": (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), None),
    "dampening": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), None),
    "adagrad": (
        partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
        None,
    ),
    "fused": (partial(torch.optim.Adam, lr=0.1, fused=True), None),
    "foreach": (partial(torch.optim.RAdam, lr=0.1, foreach=True), None),
    "own adamw": (ADAMW, fzero.optim.adamw(0.1, weight_decay=0.1)),
    "own sgd": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        fzero.optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    ),
}
CASES["a pair"] = (partial(torch.optim.SGD, lr=0.1, momentum=0.9), momentum())
WHERE = ((0, 1, False), (1, 2, True), (2, 3, False), (3, 2, True), (3, 3, False))


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_is_not_stepped_and_counts_for_itself(name: str) -> None:
    make, own = CASES[name]
    want = by_torch(make, range(len(LEFT)))
    for stage, ranks, donate in WHERE:

        def run(stage: int = stage, donate: bool = donate) -> Values:
            state = fzero.init(values(0), own or from_torch(make), stage=stage)
            state = stepped(state, range(len(LEFT)), donate=donate)
            assert name != "a pair" or state.optimizer["count"].item() == len(LEFT)
            return fzero.full_params(state)

        close(on_ranks(run, ranks), want)


def test_a_pair_that_makes_its_state_in_an_update_leaves_no_leaf_out() -> None:
    def rule(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        mu = [g + 0.9 * m for g, m in zip(grads, state or grads, strict=True)]
        return [-0.1 * m for m in mu], mu

    state = fzero.init(values(0), (lambda params: (), rule), stage=0)
    with pytest.raises(LayoutError, match="another structure after an update"):
        stepped(state, [0])
    stepped(stepped(state, [1]), [0])


@pytest.mark.parametrize("optimizer", [fzero.optim.adamw, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, {"offload": Offload(optimizer="cpu")}),
        ({"state_dtype": torch.float32}, {}),
        ({"master_weights": False, "stochastic_rounding": True}, {}),
        ({}, {"mesh": (2, 1)}),
    ],
)
def test_they_stay_bit_for_bit_wherever_states_are(
    optimizer: Any, options: Any, where: Any
) -> None:
    """In 16 bits, with masters and without, one bucket after another, on a mesh."""

    def run() -> Values:
        low = {path: x.bfloat16() for path, x in values(0).items()} | {
            "b": torch.tensor([-0.0] * 7)
        }
        rule = optimizer(0.1, **options) if optimizer is fzero.optim.adamw else None
        rule = rule or from_torch(partial(optimizer, lr=0.1), **options)
        state = stepped(fzero.init(low, rule, stage=2, **where), [1, 2, 1])
        before, kept = fzero.full_params(state), slots(state)
        state = stepped(state, [3])
        after, now = fzero.full_params(state), slots(state)
        assert all(torch.equal(bits(after[path]), bits(x)) for path, x in before.items())
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(kept, now, strict=True))
        return after

    on_ranks(run, 2)


def slots(state: Any) -> list[Tensor]:
    every = state.setup.optimizer.slots(state.optimizer)
    return [flat.clone() for flats in every.values() for flat in flats]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.ndim else x.view(1).view(torch.uint8)


def test_the_usual_case_is_one_flat_call() -> None:
    """As long as no leaf was left out nothing is apart, and a flat is stepped as a whole."""
    sizes: list[list[int]] = []

    class Seen(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            sizes.append([p.numel() for p in self.param_groups[0]["params"]])
            return super().step(closure)

    def run() -> Values:
        state = fzero.init(values(0), from_torch(partial(Seen, lr=0.1)), stage=0)
        sizes.clear()
        state = stepped(state, [1, 1])
        assert state.optimizer.apart == () and len(state.optimizer.counters["step"]) == 1
        return fzero.full_params(stepped(state, [0, 1]))

    on_ranks(run, 2)
    assert all(len(some) == 1 for some in sizes[:4])
    assert [len(some) for some in sizes[4:]] == [4, 4, 5, 5]


def test_a_count_of_a_param_group_goes_on() -> None:
    """Also if none of its parameters has a gradient, as in torch."""

    def run() -> Values:
        state = fzero.init(values(0), from_torch(GroupAdam), stage=3)
        state = stepped(state, [1, 3, 3])
        assert state.optimizer.counters["step"][0].item() == 3
        return {}

    on_ranks(run, 2)


@covered(name=["own adamw", "nadam", "dampening"], form=["fzero", "universal"])
def test_a_checkpoint_has_the_counts_of_each_leaf(name: str, form: str, tmp_path: Path) -> None:
    make, own = CASES[name]
    if form == "universal" and name != "own adamw":
        return  # DeepSpeed's layout has a step, and nothing else that counts
    write, read = (save, load) if form == "fzero" else (save_universal, load_universal)
    dtype = DOUBLE if form == "fzero" else torch.float32  # as the universal form has it

    def made(seed: int, stage: int) -> Any:
        return fzero.init(values(seed, dtype), own or from_torch(make), stage=stage)

    write(tmp_path, stepped(made(0, 0), [0, 2]))
    state = read(tmp_path, made(9, 3))
    found = fzero.full_params(stepped(state, [4, 1, 6]))
    close(found, by_torch(make, [0, 2, 4, 1, 6], dtype), 1e-13 if dtype is DOUBLE else 1e-6)


def test_a_checkpoint_of_one_count_is_loaded(tmp_path: Path) -> None:
    """Into a state whose leaves count apart, and of one that counts alike: as they were written."""
    make, _ = CASES["nadam"]
    save(tmp_path, stepped(fzero.init(values(0), from_torch(make), stage=0), [1, 6]))
    assert '"step": 2.0' in (tmp_path / "checkpoint.json").read_text()
    apart = stepped(fzero.init(values(9), from_torch(make), stage=0), [0, 2])
    state = load(tmp_path, apart)
    assert state.optimizer.apart == ()
    close(fzero.full_params(stepped(state, [5])), by_torch(make, [1, 6, 5]))


@pytest.mark.parametrize(
    "optimizer",
    [
        fzero.optim.adam(0.1, decay_mask=torch.is_tensor),
        fzero.optim.adamw(fzero.optim.schedules.warmup_cosine(1.0, 2, 10)),
        fzero.optim.lion(fzero.optim.schedules.linear(0.1, 0.2, 3)),
    ],
)
def test_a_state_can_be_pickled(optimizer: Any) -> None:
    state, file = fzero.init(values(0), optimizer, stage=2), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again: Any = torch.load(file, weights_only=False)
    assert repr(again.setup.optimizer) == repr(optimizer)
    close(*(fzero.full_params(stepped(one, [1, 2])) for one in (again, state)), atol=0.0)


def test_one_state_under_two_keys_is_not_donated() -> None:
    def step_fn(states: Any) -> Any:
        states, loss = fzero.grad_and_reduce(
            lambda p: p["a"]["a"].sum() + p["b"]["a"].sum(), states
        )()
        return fzero.apply_gradients(states), loss

    state = fzero.init(values(0), fzero.optim.adam(0.1), stage=0)
    with pytest.raises(LayoutError, match="one state under two keys"):
        fzero.shard(step_fn, stage=0, donate=True)({"a": state, "b": state})
    close(fzero.full_params(state), values(0))
    fzero.shard(step_fn, stage=0)({"a": state, "b": state})


@pytest.mark.filterwarnings("ignore:what grad_and_reduce returned was not used")
def test_views_of_a_donated_state_are_views_of_the_next() -> None:
    """As docs/semantics.md says: a copy is safe, a view is not."""
    step = fzero.shard(lambda state: (stepped(state, [1], donate=True), 0), stage=0, donate=True)
    state = fzero.init({"a": values(0)["a"]}, fzero.optim.sgd(0.1), stage=0)
    view, copy = state.params.flats[0].detach(), state.params.flats[0].clone()
    new = step(state)[0]
    assert view.data_ptr() == new.params.flats[0].data_ptr() and not state.params.flats[0].numel()
    assert torch.equal(copy.view(3, 5), values(0)["a"])


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor(0.1, requires_grad=True)])
def test_a_tensor_as_a_rate_is_told_the_way(lr: Any) -> None:
    with pytest.raises(LayoutError, match=r"to be differentiated or mapped[\s\S]*closes over it"):
        fzero.optim.adamw(lr)
    with pytest.raises(LayoutError, match=r"lion: lr is a tensor"):
        fzero.optim.lion(0.1, groups=[(lambda leaf: True, {"lr": lr})])


def test_a_pair_is_mapped_over_its_rate_on_several_ranks() -> None:
    def of(lr: Tensor) -> Tensor:
        pair = (lambda p: (), lambda grads, state, params: ([-lr * g for g in grads], state))
        state = fzero.init({"a": torch.ones(2, 3)}, pair, stage=2)
        state = fzero.grad_and_reduce(lambda p: p["a"].sum(), state)()[0]
        return fzero.full_params(fzero.apply_gradients(state))["a"]

    rates = torch.tensor([0.5, 0.25])
    found = on_ranks(lambda: {"a": torch.func.vmap(of)(rates)}, 2)["a"]
    assert torch.equal(found, (1 - rates)[:, None, None].expand(2, 2, 3))


def test_a_tried_pair_is_found_out_under_vmap() -> None:
    """Also one that is elementwise for one of the rates alone."""

    def of(lr: Tensor) -> Tensor:
        def rule(grads: Any, state: Any, params: Any) -> Any:
            return [-lr * (lr - 0.5) * g / g.norm() - g for g in grads], state

        fzero.init({"a": torch.ones(2, 3)}, (lambda p: (), rule), stage=2)
        return lr

    with pytest.raises(LayoutError, match="is not elementwise"):
        on_ranks(lambda: {"a": torch.func.vmap(of)(torch.tensor([0.5, 0.25]))}, 2)
