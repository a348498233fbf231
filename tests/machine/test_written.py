"""What operators write to: c10d's by name, for their schemas have no marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fzero.machine.placeholder import positions_written, run_watched, tells_nothing, written_by

OUTPUTS = {"outputs", "output", "output_tensor", "output_tensors", "output_lists"}


def overloads(space: str) -> list[Any]:
    names = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith(f"{space}::")]
    parts = [x.removeprefix(f"{space}::").partition(".") for x in names]
    ops = getattr(torch.ops, space)
    return [getattr(getattr(ops, name), overload or "default") for name, _, overload in parts]


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_every_collective_of_this_torch_is_known() -> None:
    found = overloads("c10d")
    assert len(found) > 15
    for func in found:
        first, *rest = [x.name for x in func._schema.arguments if "Tensor" in str(x.type)]
        assert not OUTPUTS & set(rest), func  # outputs come first
        in_place = first in ("tensor", "tensors") and func._schema.name.endswith("_")
        writes = first in OUTPUTS or (in_place and "barrier" not in func._schema.name)
        assert positions_written(func) == ((0,) if writes else ()), func
        assert not tells_nothing(func)
    for func in overloads("_c10d_functional"):
        name = func._schema.name
        if name.endswith(("_", "_out", "::irecv", "::batch_p2p_ops")):
            assert positions_written(func), func


def test_marks_and_lists_of_lists_are_read() -> None:
    aten = torch.ops.aten
    x, y = torch.ones(2), torch.zeros(2)
    assert written_by(aten._foreach_add_.List, ([x, y], [y, x]), {}) == [x, y]
    assert written_by(aten.add.out, (x, y), {"out": y})[0] is y
    assert written_by(aten.add.Tensor, (x, y), {}) == []


def test_what_was_written_is_found_bit_by_bit() -> None:
    nan, kept = torch.tensor([float("nan"), 0.0]), torch.ones(2, 2).t()

    def call() -> str:
        nan[1] = -0.0
        return "done"

    result, before = run_watched(call, [kept, nan])
    assert result == "done" and list(before) == [1]
    assert torch.signbit(before[1]).tolist()[1] is False
    assert run_watched(lambda: None, [kept, nan])[1] == {}
