"""What codecs do not go with, and what options of earlier versions say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero import Compress, codecs
from fzero.adapter import Engine
from fzero.errors import CallError, LayoutError, PhaseError
from tests.transforms.wired import INT8, Odd, each_rank

FLAT: dict[str, Any] = {}
MESH: dict[str, Any] = {"mesh": (2, 2)}
REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (2, {"gradients": torch.bfloat16}, {}, "compress: gradients=torch.bfloat16"),
    (2, {"parameters": True}, {}, "compress: parameters=True"),
    (2, {"gradients": INT8, "over": "nodes"}, {}, "compress: over='nodes'"),
    (2, {"parameters": INT8}, {}, "compress: parameters=int8.* at stage 2"),
    (
        2,
        {"parameters": INT8, "over": "replicas"},
        {},
        'compress: over="replicas" without gradients',
    ),
    (2, {"gradients": INT8}, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
]


@pytest.mark.parametrize(("stage", "kinds", "options", "seen"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused_by_both_drivers(
    stage: int, kinds: dict[str, Any], options: dict[str, Any], seen: str
) -> None:
    params, rule, module = {"w": torch.ones(2)}, fzero.optim.sgd(1.0), Odd()
    with pytest.raises(LayoutError, match=seen):
        fzero.init(params, rule, stage=stage, compress=Compress(**kinds), **options)
    with pytest.raises(LayoutError, match=seen):
        step = fzero.compress(lambda state: (state, None), **kinds)
        fzero.shard(step, stage=stage, **options).init(params, rule)
    with pytest.raises(LayoutError, match=seen):
        Engine(module, None, stage=stage, compress=Compress(**kinds), **options)
    Engine(module, None, stage=stage).close()  # nothing was touched


@pytest.mark.parametrize(("stage", "options"), [(2, FLAT), (0, MESH)])
def test_replicas_where_there_are_none_are_refused(stage: int, options: dict[str, Any]) -> None:
    def body(rank: int) -> None:
        compress = Compress(gradients=INT8, over="replicas")
        with pytest.raises(LayoutError, match='over="replicas" at stage'):
            Engine(Odd(), None, stage=stage, compress=compress, **options)

    each_rank(body, 4)


@pytest.mark.parametrize(
    "option", ["quantized_gradients", "quantized_weights", "communication_dtype"]
)
def test_options_of_earlier_versions_say_what_replaces_them(option: str) -> None:
    given: Any = {option: torch.bfloat16 if option == "communication_dtype" else True}
    params, rule = {"w": torch.ones(2)}, fzero.optim.sgd(1.0)
    kind = "parameters" if option == "quantized_weights" else "gradients"
    for call in (
        lambda: fzero.init(params, rule, stage=2, **given),
        lambda: fzero.shard(lambda state: (state, None), stage=2, **given),
        lambda: Engine(Odd(), None, stage=2, **given),
        lambda: fzero.plan(Odd(), torch.ones(1), world=2, stage=2, **given),
    ):
        with pytest.raises(CallError, match=rf"{option}[\s\S]*Compress\({kind}=fzero.codecs"):
            call()


def test_a_state_for_other_codecs_is_refused() -> None:
    def step_fn(state: Any) -> Any:
        return fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()

    def body(rank: int) -> None:
        step = fzero.shard(fzero.compress(step_fn, gradients=INT8), stage=2)
        params, rule = {"w": torch.ones(4)}, fzero.optim.sgd(1.0)
        for made in (None, Compress(gradients=codecs.int8(block=32))):
            with pytest.raises(PhaseError, match="the state was made for gradients="):
                step(fzero.init(params, rule, stage=2, compress=made))
        step(fzero.init(params, rule, stage=2, compress=Compress(gradients=INT8)))
        neutral = fzero.shard(fzero.compress(step_fn, gradients=None), stage=2)
        neutral(fzero.init(params, rule, stage=2))

    each_rank(body, 2)
