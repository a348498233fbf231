"""Each call of `apply` has a copy of the module of its own, wired as the module is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from fzero.transforms.functionalize import functionalize


class Wired(nn.Module):
    """Reaches its own layers by a list, a bound method and a reference that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.order = [self.second, self.first]
        self.forward = self.run
        vars(self.first)["owner"] = self
        self.scale = torch.tensor([2.0, 3.0, 4.0])  # no buffer

    def run(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x) * self.scale
        self.order.append(self.first)
        return vars(self.first)["owner"].second(x)


def test_layers_that_are_reached_by_other_ways_than_their_names_get_the_params_too() -> None:
    module = Wired()
    apply, params = functionalize(module)
    moved = {name: value + 0.25 for name, value in params.items()}
    x = torch.randn(2, 3)
    first = apply(moved, x)
    grads = torch.func.grad(lambda p: apply(p, x).sum())(moved)
    assert module.order == [module.second, module.first]  # the module was not run
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(moved[name])
    want = module(x)
    torch.testing.assert_close(first, want)
    want.sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_two_threads_inside_one_forward_keep_their_own_parameters() -> None:
    meeting = threading.Barrier(2)

    class Meet(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meeting.wait(timeout=20)
            return x

    module = nn.Sequential(nn.Linear(3, 3), Meet(), nn.Linear(3, 3), Meet(), nn.Linear(3, 2))
    apply, params = functionalize(module)
    x = torch.randn(4, 1, 3)

    def rank(number: int) -> tuple[dict[str, Tensor], Tensor]:
        mine = {name: value * (number + 1) for name, value in params.items()}
        return torch.func.grad_and_value(lambda p: apply(p, x).sum())(mine)

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(rank, range(2)))
    meeting = threading.Barrier(1)
    for number, (grads, value) in enumerate(both):
        want_grads, want = rank(number)
        assert torch.equal(value, want)
        assert all(torch.equal(grads[name], want_grads[name]) for name in params)
    assert not torch.equal(both[0][1], both[1][1])


class Remembers(nn.Module):
    """Stores on itself, and appends to its own lists, as mixtures of experts and caches do."""

    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.losses: list[Tensor] = []
        self.seen: dict[str, list[Tensor]] = {"x": []}

    def forward(self, x: Tensor) -> Tensor:
        assert self.last is None
        if x.isnan().any():
            raise ValueError("not a number")
        self.last = self.layer(x)
        self.losses.append(self.last.square().mean())
        self.seen["x"].append(x)
        return self.last.sum() + sum(self.losses) + len(self.seen["x"])


def test_what_a_forward_stores_stays_on_the_copy_of_its_call() -> None:
    module = Remembers()
    apply, params = functionalize(module)
    found = set()
    for _ in range(3):
        found.add(apply(params, torch.ones(3, 2)).item())
        with pytest.raises(ValueError, match="not a number"):  # and apply is good after it
            apply(params, torch.full((3, 2), torch.nan))
    assert len(found) == 1
    assert (module.losses, module.seen, module.last) == ([], {"x": []}, None)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="its compiler breaks a graph at copy.deepcopy(value, memo)",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import
def test_a_compiled_loss_is_one_graph() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.order = [self.layer]
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.order[0](x) * self.mask

    apply, params = functionalize(Masked())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return apply(params, x).square().sum()

    x = torch.randn(2, 3)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(params, x), loss(params, x))
    moved = {name: value + 1 for name, value in params.items()}
    assert torch.equal(compiled(moved, x), loss(moved, x))


def test_a_module_with_a_hook_of_load_state_dict_is_functionalized() -> None:
    """torch refers weakly to the module in such a hook, in each copy of it."""
    module, seen = nn.Linear(2, 1), []
    module.register_load_state_dict_pre_hook(lambda *_: seen.append(1))
    apply, params = functionalize(module)
    x = torch.ones(3, 2)
    assert torch.equal(apply(params, x), module(x))
    assert not seen
