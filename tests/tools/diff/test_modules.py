"""The first module of a forward whose output differs is named; what is no module's fault is not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fzero
from tests.zoo import FAMILIES
from tests.zoo.runs import run_of

LLAMA, RESIDUAL = FAMILIES["llama"], FAMILIES["residual"]


class Transposed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight + self.bias


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x.bfloat16()).to(x.dtype)


def transposed(module: Any) -> Any:
    module.layers[3].__class__ = Transposed
    return module


def another_eps(module: Any) -> Any:
    module.norms[5].eps = 1e-4
    return module


def another_theta(module: Any) -> Any:
    module.model.rotary_emb.inv_freq *= 1.001
    return module


def an_activation_in_bf16(module: Any) -> Any:
    module.model.layers[1].mlp.act_fn = Rounded()
    return module


def rounds_between(module: Any) -> Any:
    """Between the modules that the forward of one calls."""
    mlp = module.model.layers[0].mlp

    class Between(type(mlp)):
        def forward(self, x: Tensor) -> Tensor:
            gate = self.act_fn(self.gate_proj(x)).bfloat16().to(x.dtype)
            return self.down_proj(gate * self.up_proj(x))

    mlp.__class__ = Between
    return module


def a_layer_left_out(module: Any) -> Any:
    class Nothing(type(module.model.layers[1])):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x

    module.model.layers[1].__class__ = Nothing
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
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_module_is_named(family: Any, fault: Any, at: Any, path: str, where: str) -> None:
    found = fzero.diff(run_of(family, 0, 1), run_of(family, *at, model=fault))
    assert found is not None and found.kind == "module", found
    assert (found.path, found.operation) == (path, where)
    assert found.ranks == tuple(range(at[1])) and found.at.backward == 1
    assert f"module {path}[" in str(found).splitlines()[0]


def test_on_one_rank_alone() -> None:
    def fault(module: Any) -> Any:
        class OnRank1(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                factor = 1.01 if fzero.axis_index() == 1 else 1.0
                return super().forward(input) * factor

        module.layers[2].__class__ = OnRank1
        return module

    found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 3, 4, model=fault))
    assert found is not None and (found.path, found.ranks) == ("layers.2", (1,))


def test_what_no_module_has_made_is_not_named_so() -> None:
    def other(model: Any, batch: Any) -> Tensor:
        return RESIDUAL.loss(model, batch) * 1.001

    def turned(model: Any, batch: Any) -> Tensor:
        return RESIDUAL.loss(model, (batch[0].roll(1, 0), batch[1]))

    for loss in (other, turned):
        found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, loss=loss))
        assert found is not None and (found.operation, found.path) == ("loss", "")


def test_a_wrong_gradient_is_no_modules() -> None:
    def fault(module: Any) -> Any:
        class Half(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                weight = self.weight / 2 + self.weight.detach() / 2
                return F.linear(input, weight, self.bias)

        module.layers[2].__class__ = Half
        return module

    found = fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, model=fault))
    assert found is not None and (found.operation, found.path) == ("gradient", "layers.2.weight")


def test_a_forward_that_a_backward_repeats_is_none_of_its_own() -> None:
    def repeated(module: Any) -> Any:
        class Repeated(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return checkpoint(super().forward, input, use_reentrant=False)

        module.layers[2].__class__ = Repeated
        return module

    good = run_of(RESIDUAL, 0, 1, model=repeated)
    assert fzero.diff(good, run_of(RESIDUAL, 3, 2, model=repeated, calls=1)) is None
    found = fzero.diff(good, run_of(RESIDUAL, 3, 2, model=lambda x: transposed(repeated(x))))
    assert found is not None and found.path == "layers.3"


def test_a_module_that_is_called_twice_is_named_by_its_path() -> None:
    family = FAMILIES["albert"]  # one layer, several times

    def fault(module: Any) -> Any:
        layer = module.albert.encoder.albert_layer_groups[0].albert_layers[0]

        class Rounds(type(layer.ffn_output)):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input).bfloat16().to(input.dtype)

        layer.ffn_output.__class__ = Rounds
        return module

    found = fzero.diff(run_of(family, 0, 1), run_of(family, 3, 2, model=fault))
    assert found is not None
    assert found.path == "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"


def test_no_hook_is_left_behind() -> None:
    from torch.nn.modules import module as hooks

    def raises(module: Any) -> Any:
        class Raises(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                raise ZeroDivisionError("in a module")

        module.layers[2].__class__ = Raises
        return module

    with pytest.raises(ZeroDivisionError):
        fzero.diff(run_of(RESIDUAL, 0, 1), run_of(RESIDUAL, 2, 2, model=raises))
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
