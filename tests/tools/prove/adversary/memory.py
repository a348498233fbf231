"""Views, writes in place and copies: what a value is at the time when it is read."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.tools.prove.adversary.places import Fn, as_data, as_own, as_update, on_many
from tests.tools.prove.adversary.programs import Program

KIND = "memory"


def _after(view: Fn, write: Fn) -> Fn:
    """A view of a copy, which is written to before the view is read."""

    def fn(x: Tensor) -> Tensor:
        kept = x.clone()
        seen = view(kept)
        write(kept)
        return seen.reshape(x.shape) if seen.numel() == x.numel() else x * seen.sum()

    return fn


def _before(view: Fn, write: Fn) -> Fn:
    """The same, but the view is copied first."""

    def fn(x: Tensor) -> Tensor:
        kept = x.clone()
        seen = view(kept).clone()
        write(kept)
        return seen.reshape(x.shape) if seen.numel() == x.numel() else x * seen.sum()

    return fn


def _through(view: Fn, write: Fn) -> Fn:
    """A view of a copy is written to; the copy is read."""

    def fn(x: Tensor) -> Tensor:
        kept = x.clone()
        write(view(kept))
        return kept

    return fn


VIEWS: dict[str, Fn] = {
    "transposed twice": lambda x: x.t().t(),
    "transposed": lambda x: x.t(),
    "transposed, and a row": lambda x: x.t()[0],
    "a column of columns": lambda x: x[:, 1:][:, 0],
    "a column of rows": lambda x: x[1:][:, 0],
    "permuted twice": lambda x: x.view(2, 2, -1).permute(2, 0, 1).permute(1, 2, 0),
    "a diagonal": lambda x: x.diagonal(),
    "a diagonal, transposed": lambda x: x.t().diagonal(),
    "unbound": lambda x: x.unbind(1)[0],
    "unbound twice": lambda x: x.view(2, 2, -1).unbind(1)[0].unbind(1)[0],
    "every other row": lambda x: x[::2],
    "every other of every other": lambda x: x[:, ::2][::2],
    "expanded": lambda x: x[:1].expand(3, -1),
    "expanded, a column": lambda x: x[:1].expand(3, -1)[:, 0],
    "windows": lambda x: x.unfold(1, 2, 1),
    "windows, transposed": lambda x: x.unfold(1, 2, 1).transpose(0, 1),
    "split by columns": lambda x: x.split(2, 1)[1],
    "split by columns, a row": lambda x: x.split(2, 1)[1][0],
    "chunks of chunks": lambda x: x.chunk(2)[1].chunk(2, 1)[0],
    "a row of a view": lambda x: x.view(-1)[1:4],
    "squeezed": lambda x: x.t().unsqueeze(0).squeeze(0).t(),
    "detached": lambda x: x.detach(),
    "detached, transposed": lambda x: x.t().detach(),
    "data": lambda x: x.data,
    "as complex": lambda x: torch.view_as_complex(x.view(-1, 2)).real,
    "as complex, and back": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2))),
    "moved": lambda x: x.movedim(0, 1).swapaxes(0, 1),
    "narrowed": lambda x: x.narrow(1, 1, 2).narrow(0, 0, 1),
    "mT": lambda x: x.mT.mT,
    "itself": lambda x: x,
    "itself, as a view": lambda x: x.view_as(x),
    "a row, as a column": lambda x: x[0].unsqueeze(1),
    "reshaped": lambda x: x.reshape(-1),
    "contiguous": lambda x: x.contiguous(),
    "to the same dtype": lambda x: x.to(torch.float32),
    "flattened": lambda x: x.flatten(),
    "a real part": lambda x: x.real,
}

ZEROED: dict[str, Fn] = {
    "mul_": lambda x: x.mul_(3.0),
    "copy_": lambda x: x.copy_(x.flip(0) * 2),
    "a row": lambda x: x[0].zero_(),
    "a column": lambda x: x[:, 0].fill_(0.3),
    "an element": lambda x: x.view(-1)[0].add_(1.0),
    "by an index": lambda x: x.index_put_((torch.tensor([0]),), x[1:2] * 2),
    "by a mask": lambda x: x.masked_fill_(x > 0, 0.2),
    "through a transposed view": lambda x: x.t().mul_(2.0),
    "random": lambda x: x.clamp_(-0.1, 0.1),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "out=": lambda x: torch.mul(x, 2.0, out=x),
    "data": lambda x: x.data.mul_(2.0),
    "addmm_": lambda x: x.addmm_(x[:, :1] * 1.0, x[:1] * 1.0),
    "cumsum_": lambda x: x.cumsum_(0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 2.0),
    "lerp_": lambda x: x.lerp_(torch.ones(()), 0.5),
    "swap": lambda x: x.copy_(x.roll(1, 0)),
}


SAME = (  # the write is not to what the view sees, or not one that torch can make
    *("a column of columns, a column", "a column of rows, an element", "a diagonal, by a mask"),
    *("detached, transposed, an element", "a row, as a column, cumsum_", "reshaped, scatter_"),
    "a row, as a column, scatter_",
    *("expanded, a column, cumsum_", "split by columns, swap"),
)


def programs() -> Iterator[Program]:
    writes = list(ZEROED.items())
    for i, (name, view) in enumerate(VIEWS.items()):
        what, write = writes[i % len(writes)]
        if f"{name}, {what}" in SAME or what == "foreach":
            what, write = writes[0]
        both = on_many(_before(view, write), _after(view, write))
        place = (as_update, as_data, as_own)[i % 3]
        yield place(KIND, f"{name}, {what}, then read", both)
        if "expanded" not in name and "windows" not in name:
            both = on_many(lambda x: x, _through(view, write if what != "a row" else writes[0][1]))
            yield as_update(KIND, f"{name}, {what}, through it", both)
    for what, write in writes:
        view = VIEWS["transposed twice"]
        yield as_update(KIND, f"transposed twice, {what}", on_many(_before(view, write), _after(view, write)))  # fmt: skip
