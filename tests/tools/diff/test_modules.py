"""The first module of a forward whose output differs is named; what is no module's fault is not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fzero
from tests.zoo import FAMILIES
from tests.zoo.runs import run_of

LLAMA, RESIDUAL = FAMILIES["llama"], FAMILIES["residual"]


def forwarding(path: str, forward: Any) -> Any:
    """A fault: the module at a path runs `forward(module, its own forward, *args)`."""

    def fault(module: Any) -> Any:
        layer = module.get_submodule(path)
        plain = type(layer).forward

        def other(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, lambda *x: plain(self, *x), *args, **kwargs)

        layer.__class__ = type("Other", (type(layer),), {"forward": other})
        return module

    return fault


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def between(mlp: Any, plain: Any, x: Tensor) -> Tensor:
    """It rounds between the modules that the forward calls."""
    return mlp.down_proj(rounded(mlp.act_fn(mlp.gate_proj(x))) * mlp.up_proj(x))


transposed = forwarding("layers.3", lambda self, plain, x: x @ self.weight + self.bias)
rounds_between = forwarding("model.layers.0.mlp", between)
a_layer_left_out = forwarding("model.layers.1", lambda self, plain, x, *args, **kwargs: x)
an_activation_in_bf16 = forwarding(
    "model.layers.1.mlp.act_fn", lambda self, plain, x: rounded(F.silu(rounded(x)))
)


def another_eps(module: Any) -> Any:
    module.norms[5].eps = 1e-4
    return module


def another_theta(module: Any) -> Any:
    module.model.rotary_emb.inv_freq *= 1.001
    return module


@pytest.mark.parametrize(
    ("family", "fault", "at", "path", "where"),
    [
        (RESIDUAL, transposed, (0, 1), "layers.3", "module"),
        (RESIDUAL, another_eps, (3, 2), "norms.5", "module"),
        (LLAMA, another_theta, (3, 2), "model.rotary_emb", "module"),
        (LLAMA, an_activation_in_bf16, (2, 2), "model.layers.1.mlp.act_fn", "module"),
        (
            LLAMA,
            rounds_between,
            (0, 1),
            "model.layers.0.mlp",
            "module, where it calls model.layers.0.mlp.down_proj",
        ),
        (LLAMA, a_layer_left_out, (1, 2), "model.layers.1", "module"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_module_is_named(family: Any, fault: Any, at: Any, path: str, where: str) -> None:
    found = fzero.diff(run_of(family, 0, 1), run_of(family, *at, model=fault))
    assert found is not None and found.kind == "module", found
    assert (found.path, found.operation) == (path, where)
    assert found.ranks == tuple(range(at[1])) and found.at.backward == 1
    assert f"module {path}[" in str(found).splitlines()[0]


def test_on_one_rank_alone() -> None:
    fault = forwarding("layers.2", lambda self, plain, x: plain(x) * (1 + 0.01 * on_rank_1()))
    found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 3, 4, model=fault))
    assert found is not None and (found.path, found.ranks) == ("layers.2", (1,))


def on_rank_1() -> bool:
    return fzero.axis_index() == 1


def test_what_no_module_has_made_is_not_named_so() -> None:
    def other(model: Any, batch: Any) -> Tensor:
        return RESIDUAL.loss(model, batch) * 1.001

    def turned(model: Any, batch: Any) -> Tensor:
        return RESIDUAL.loss(model, (batch[0].roll(1, 0), batch[1]))

    for loss in (other, turned):
        found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, loss=loss))
        assert found is not None and (found.operation, found.path) == ("loss", "")


def test_a_wrong_gradient_is_no_modules() -> None:
    def half(self: Any, plain: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / 2 + self.weight.detach() / 2, self.bias)

    fault = forwarding("layers.2", half)
    found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, model=fault))
    assert found is not None and (found.operation, found.path) == ("gradient", "layers.2.weight")


def test_a_forward_that_a_backward_repeats_is_none_of_its_own() -> None:
    def again(self: Any, plain: Any, x: Tensor) -> Tensor:
        return checkpoint(plain, x, use_reentrant=False)

    repeated = forwarding("layers.2", again)
    good = run_of(RESIDUAL, 0, 1, model=repeated)
    assert fzero.diff(good, run_of(RESIDUAL, 3, 2, model=repeated, calls=1)) is None
    found = fzero.diff(good, run_of(RESIDUAL, 3, 2, model=lambda x: transposed(repeated(x))))
    assert found is not None and found.path == "layers.3"


def test_a_module_that_is_called_twice_is_named_by_its_path() -> None:
    family = FAMILIES["albert"]  # one layer, several times

    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    fault = forwarding(path, lambda self, plain, x: rounded(plain(x)))
    found = fzero.diff(run_of(family, 0, 1), run_of(family, 3, 2, model=fault))
    assert found is not None and found.path == path


def test_no_hook_is_left_behind() -> None:
    from torch.nn.modules import module as hooks

    raises = forwarding("layers.2", lambda self, plain, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, model=raises))
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
