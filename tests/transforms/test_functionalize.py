"""`functionalize`: the pure function equals the module, touches nothing, refuses the rest.

Buffers are in test_functional_buffers.py, the copies that calls run in test_module_copy.py.
"""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize

import fzero
from fzero.errors import LayoutError
from fzero.transforms.functionalize import functionalize, unit_of
from tests.covering import covered


class TiedGPT(nn.Module):
    """Embedding and head are one tensor; a constant causal mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()  # as many models do before they run
        return self.rnn(x)[0]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.rows = nn.ParameterList([torch.randn(3), torch.randn(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * self.rows[0] + self.rows[1]


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied gpt": (TiedGPT, lambda: torch.randint(11, (2, 5))),
    "lstm": (Recurrent, lambda: torch.randn(2, 3, 4)),
    "layer twice": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), lambda: torch.randn(3, 4)),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), lambda: torch.ones(4)),
    "old weight norm": (old_weight_norm, lambda: torch.ones(2, 4)),
    "parameter list": (Weights, lambda: torch.randn(3)),
}


def snapshot(module: nn.Module) -> dict[str, Any]:
    state = {k: (v, v._version, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    return {"state": state, "vars": [dict(vars(part)) for part in module.modules()]}


def assert_untouched(module: nn.Module, before: dict[str, Any]) -> None:
    for name, value in module.state_dict(keep_vars=True).items():
        same, version, clone = before["state"][name]
        assert value is same and value._version == version and torch.equal(value, clone)
    for part, attributes in zip(module.modules(), before["vars"], strict=True):
        assert list(vars(part)) == list(attributes)
        assert all(vars(part)[key] is value for key, value in attributes.items())


@covered(training=[True, False], case=[*CASES])
def test_apply_and_its_gradient_equal_the_module(case: str, training: bool) -> None:
    make, inputs = CASES[case]
    module, x = make(), inputs()
    module.train(training)
    before = snapshot(module)
    apply, params = functionalize(module)
    moved = {name: value + 0.25 for name, value in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return apply(params, x).square().sum()

    grads, value = torch.func.grad_and_value(loss)(moved)
    plain = {name: leaf.clone().requires_grad_() for name, leaf in moved.items()}
    loss(plain).backward()
    assert_untouched(module, before)

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(moved[name])
    want = module(x).square().sum()
    want.backward()
    torch.testing.assert_close(value, want)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
        torch.testing.assert_close(plain[name].grad, parameter.grad)
        assert grads[name].abs().sum() > 0


def test_params_share_memory_once_per_tie_and_mark_the_frozen() -> None:
    module = TiedGPT()
    module.get_parameter("layers.0.linear1.weight").requires_grad_(False)
    apply, params = functionalize(module)
    named = dict(module.named_parameters())
    assert type(params) is dict and list(params) == list(named)
    assert "embed.weight" in params and "head.weight" not in params
    for name, value in params.items():
        assert value.data_ptr() == named[name].data_ptr() and not value.requires_grad
        assert isinstance(value, nn.Parameter) is (name == "layers.0.linear1.weight")
    assert repr(apply) == "apply(TiedGPT, 25 params, 3 units)"
    assert functools.wraps(apply)(lambda: None).__name__ == "apply"


def test_apply_takes_any_tensor_and_any_order() -> None:
    module = nn.Linear(2, 2)
    apply, params = functionalize(module)
    x = torch.randn(3, 2)
    backwards = dict(reversed(params.items()))
    assert torch.equal(apply(backwards, input=x), module(x))

    ensemble = {name: torch.stack([value, 2 * value]) for name, value in params.items()}
    out = torch.func.vmap(apply, in_dims=(0, None))(ensemble, x)
    torch.testing.assert_close(out, torch.stack([module(x), 2 * module(x)]))
    tangent = torch.func.jvp(lambda p: apply(p, x), (params,), (params,))[1]
    torch.testing.assert_close(tangent, module(x))  # linear in its parameters
    per_sample = torch.func.vmap(torch.func.grad(lambda p, x: apply(p, x).sum()), (None, 0))
    torch.testing.assert_close(per_sample(params, x)["weight"], x[:, None].expand(3, 2, 2))
    graph = make_fx(lambda p: apply(p, x))(params)
    assert torch.equal(graph(backwards | {"bias": x[0]}), apply(params | {"bias": x[0]}, x))
    meta = {name: value.to("meta") for name, value in params.items()}
    assert apply(meta, x.to("meta")).shape == (3, 2)


@pytest.mark.parametrize("make", [nn.Dropout, lambda p: nn.TransformerEncoderLayer(4, 2, 8, p)])
def test_dropout_and_mode_are_those_of_the_module_when_called(
    make: Callable[[float], nn.Module],
) -> None:
    part = make(0.5)
    module = nn.Sequential(nn.Linear(4, 4), part)
    apply, params = functionalize(module)
    x = torch.randn(3, 6, 4)

    def same(module: nn.Module = module) -> bool:
        torch.manual_seed(3)
        out = apply(params, x)
        torch.manual_seed(3)
        torch.testing.assert_close(out, module(x))
        return torch.equal(apply(params, x), apply(params, x))

    assert not same()
    module.eval()
    assert same()
    part.train()  # a part alone
    assert not same()
    module.eval()
    assert same()
    del module, same
    gc.collect()
    assert torch.equal(apply(params, x), apply(params, x))  # the mode last seen


def test_apply_keeps_neither_the_module_nor_what_a_call_bound() -> None:
    module = Recurrent()
    apply, params = functionalize(module)
    gone = [weakref.ref(module), *(weakref.ref(p) for p in module.parameters())]
    moved = {name: value.clone() for name, value in params.items()}
    apply(moved, torch.randn(1, 3, 4))
    gone += [weakref.ref(value) for value in moved.values()]
    del module, moved
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_an_rnn_does_not_move_the_weights_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def flatten(self: nn.RNNBase) -> None:
        pytest.fail("on CUDA this would move the weights")

    apply, params = functionalize(Recurrent())
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    assert apply(params, torch.ones(1, 3, 4)).shape == (1, 3, 12)


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("model.layers.0.attn.weight", "model.layers.0"),
        ("layers.10.blocks.3.weight", "layers.10"),
        ("0.weight", "0"),
        ("0", "0"),
        ("model.embed.weight", "model.embed"),
        ("head.weight", "head"),
        ("layer1.conv2.weight", "layer1.conv2"),
        ("scale", "scale"),
    ],
)
def test_unit_of(path: str, unit: str) -> None:
    assert unit_of(path) == unit


def test_units_are_the_outermost_that_the_predicate_picks() -> None:
    kinds = nn.TransformerEncoderLayer | nn.MultiheadAttention
    apply, params = functionalize(TiedGPT(), units=lambda name, m: isinstance(m, kinds))
    assert {apply.units(path) for path in params} == {"embed", "layers.0", "layers.1"}
    assert apply.units("layers.0.self_attn.in_proj_weight") == "layers.0"
    halves, params = functionalize(TiedGPT(), units=lambda name, m: name.endswith("self_attn"))
    assert halves.units("layers.0.self_attn.out_proj.weight") == "layers.0.self_attn"
    assert halves.units("layers.0.linear1.weight") == "layers.0"
    whole, params = functionalize(TiedGPT(), units=lambda name, m: True)
    assert {whole.units(path) for path in params} == {""}
    assert repr(whole) == "apply(TiedGPT, 25 params, 1 units)"


def locked() -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module)["lock"] = threading.Lock()
    return module


def compiled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile()
    return module


@pytest.mark.parametrize(
    "edit",
    [
        lambda module: setattr(module, "0", nn.Linear(2, 2)),
        lambda module: module.append(nn.ReLU()),
        lambda module: parametrize.register_parametrization(module[0], "weight", nn.Identity()),
    ],
)
def test_an_edited_module_is_refused(edit: Callable[[nn.Sequential], None]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    apply, params = functionalize(module)
    assert apply(params, torch.ones(2)).shape == (2,)
    edit(module)
    with pytest.raises(LayoutError, match=r"gained, lost or replaced[^$]*Fix: call `functionalize"):
        apply(params, torch.ones(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.sin, r"takes an nn.Module, got builtin_function_or_method"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0 \(LazyLinear\)[^$]*run one forward first"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), r"max_norm=1.0[^$]*leave max_norm out"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"DataParallel[^$]*pass the module inside"),
        (locked, r"Linear cannot be copied: .*lock[^$]*outside of the module"),
        (lambda: nn.Sequential(compiled()), r"0 \(Linear\) is compiled"),
    ],
)
def test_what_cannot_be_functionalized_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        functionalize(make())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: list(p.values()), r"apply got a list in the place of the params"),
        (lambda p: {"weight": p["weight"]}, r"no 'bias' \(1 missing, 0 unexpected of 2\)"),
        (lambda p: p | {"head.weight": p["bias"]}, r"an unexpected 'head.weight' \(0 missing, 1"),
        (lambda p: p | {"bias": 1.0}, r"params\['bias'\] is a float, not a tensor"),
        (lambda p: p | {"bias": p["bias"][:1]}, r"shape \(1,\), the module has \(3,\)"),
    ],
)
def test_params_of_another_module_are_refused(edit: Callable[[Any], Any], message: str) -> None:
    apply, params = functionalize(nn.Linear(2, 3))
    fix = r"[^$]*Fix: (pass what `functionalize` return|call apply)"
    with pytest.raises(LayoutError, match=message + fix):
        apply(edit(params), torch.ones(2))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_params_of_a_state_are_refused_with_the_way_to_those_of_the_module(stage: int) -> None:
    apply, params = functionalize(nn.Linear(2, 3))
    state: Any = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)
    with pytest.raises(LayoutError, match=r"apply\(fzero.full_params\(state\), ...\)"):
        apply(state.params, torch.ones(2))
    assert apply(fzero.full_params(state), torch.ones(2)).shape == (3,)
