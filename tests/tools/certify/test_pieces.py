"""Models whose loss names an axis of the mesh, along which ranks have pieces of one batch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from fzero.tools.certify.subject import Reads
from tests.tools.certify.faults import PLAIN

FEW: dict[str, Any] = {
    **PLAIN,
    **{"precisions": "fp64", "micro_batches": 2, "windows": "coalesce", "clipping": "off"},
}
MESHES = [{"data": 1, "seq": 2}, {"data": 2, "seq": 2}]
IGNORED = -100


class Causal(nn.Module):
    """One layer of Ulysses attention over pieces of a sequence; `fault` names what is wrong."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(11, 8), nn.Embedding(8, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 11)

    def exchange(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        found = fzero.all_to_all(x, split_dim=split_dim, concat_dim=concat_dim, axis="seq")
        lost = self.fault == "no gradient passes" and fzero.axis_size("seq") > 1
        return found.detach() if lost else found

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, piece, 11] of the next token."""
        piece = tokens.shape[1]
        first = 0 if self.fault == "positions of a piece" else fzero.axis_index("seq") * piece
        x = self.embed(tokens) + self.places(first + torch.arange(piece))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.fault != "attention in a piece":
            q, k, v = (self.exchange(x, 1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.fault != "attention in a piece":
            y = self.exchange(y, 2, 1)
        return self.out(x + y.transpose(1, 2).flatten(2))


def loss_of(fault: str = "") -> Any:
    """Return the loss: the mean over the tokens of a batch that have a label."""

    def loss(model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        scores = model(tokens).flatten(0, 1)
        total = F.cross_entropy(scores, labels.flatten(), reduction="sum", ignore_index=IGNORED)
        count = (labels != IGNORED).sum()
        if fault != "total of a piece":
            total = fzero.psum(total, axis="seq")
        return total / (count if fault == "count of a piece" else fzero.psum(count, axis="seq"))

    return loss


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the next ones [2, 8]; the second piece has fewer labels."""
    text = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(number))
    labels = text[:, 1:].clone()
    labels[0, 5:] = IGNORED
    return text[:, :-1], labels


def certify(fault: str = "", **options: Any) -> Any:
    given = {**FEW, "meshes": MESHES, "cut": {"seq": 1}, "stages": (0, 3), **options}
    return fzero.certify(Causal(fault), loss_of(fault), batch, **given)


def test_a_sound_model_is_that_of_one_process_with_whole_sequences() -> None:
    report = certify(stages=(0, 1, 2, 3), windows=("each", "accumulate"), ragged=("off", "on"))
    assert report, report.failures[0].describe()
    assert {cell.at["meshes"] for cell in report.cells} == {"data 1 x seq 2", "data 2 x seq 2"}
    assert not any(cell.exact for cell in report.cells)
    assert max(check.bound for cell in report.cells for check in cell.checks) < 1e-12


def test_it_is_so_where_gradients_are_summed_clipped_and_copied_along_an_axis() -> None:
    mesh = fzero.Mesh({"data": 2, "seq": 2}, replicate="data")
    several = {"clipping": "on", "reductions": ("mean", "sum"), "wires": "predivided"}
    report = certify(meshes=mesh, precisions=("fp64", "fp32"), **several)
    assert report, report.failures[0].describe()
    assert report.cells[0].at["meshes"] == "data 2 x seq 2, copies along data"


@pytest.mark.parametrize(
    "fault",
    [
        "no gradient passes",
        "positions of a piece",
        "attention in a piece",
        "total of a piece",
        "count of a piece",
    ],
)
def test_a_fault_of_the_model_is_found_in_every_cell(fault: str) -> None:
    report = certify(fault)
    assert len(report.failures) == len(report.cells) == 4
    assert not any(cell.error for cell in report.cells)
    assert all(cell.agrees("gradient") is False for cell in report.cells)
    # the loss of the first update is right where only the gradient is lost
    firsts = {cell.checks[0].difference.update for cell in report.cells}
    assert firsts == ({2} if fault == "no gradient passes" else {1})


@pytest.mark.parametrize(
    "cut",
    [
        (1, 1),
        lambda batch, index, size: tuple(x.chunk(size, 1)[index] for x in batch),
    ],
    ids=["dims", "function"],
)
def test_each_argument_has_a_dim_or_a_function_cuts(cut: Any) -> None:
    assert certify(meshes={"seq": 2}, cut={"seq": cut}, stages=3)


@pytest.mark.parametrize("name", ["ulysses", "ring_attention"])
def test_an_example_is_certified_as_it_is(name: str) -> None:
    """With remat, whose recomputation names the axis too; the ring in zigzag order."""
    example: Any = importlib.import_module(name)

    def loss(params: Any, batch: Any) -> Tensor:
        return example.loss(params, *batch)

    def zigzag(batch: Any, index: int, size: int) -> Any:
        return tuple(example.piece(x, index, size) for x in batch)

    def texts(number: int) -> Any:
        text = torch.randint(10, (2, 25), generator=torch.Generator().manual_seed(number))
        return text[:, :-1], text[:, 1:]

    given = {**FEW, "meshes": MESHES, "stages": (0, 3)}
    report = fzero.certify(example.params, loss, texts, cut={"seq": zigzag}, **given)
    assert report, report.failures[0].describe()


def test_an_argument_may_be_whole_on_every_rank() -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        x, scale = batch
        return fzero.pmean((params["w"] * x).square().mean() * scale.sum(), axis="seq")

    batches = [(torch.randn(4, 6), torch.rand(4)) for _ in range(8)]
    given = {**FEW, "meshes": MESHES[1], "stages": 2}
    params = {"w": torch.randn(1)}
    assert fzero.certify(params, loss, batches, cut={"seq": (1, None)}, **given)
    assert not fzero.certify(params, loss, batches, cut={"seq": (1, 0)}, **given)


def test_ranks_that_differ_in_a_cut_axis_alone_share_a_batch() -> None:
    reads = Reads(axes=(("seq", 2), ("data", 3), ("row", 2)), cut={"seq": 1, "row": 0})
    assert [reads.of(rank)[0] for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    whole = torch.arange(8).reshape(2, 4)
    assert [reads.piece(whole, rank).tolist() for rank in (0, 1, 6, 7)] == [
        [[0, 1]],
        [[4, 5]],
        [[2, 3]],
        [[6, 7]],
    ]


def test_a_step_of_ones_own_is_given_the_mesh() -> None:
    def make_step(loss_fn: Any, *, mesh: Any, stage: int, **_: Any) -> Any:
        def step_fn(state: Any, batches: Any) -> Any:
            for one in batches:
                state, _ = fzero.grad_and_reduce(loss_fn, state)(one)
            return fzero.apply_gradients(state), None

        return fzero.shard(step_fn, stage=stage, mesh=mesh)

    assert certify(step=make_step, windows="each")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"meshes": "flat"}, "no mesh with names"),
        ({"meshes": ("flat", {"seq": 2})}, "meshes with names beside others"),
        ({"worlds": 2}, "meshes with names beside `worlds`"),
        ({"cut": {"sequence": 1}}, r"cut names \['sequence'\], and a mesh has the axes"),
        ({"cut": {"seq": 2}}, r"shape \(2, 8\) cannot be cut in 2 along dim 2, for the axis 'seq'"),
        ({"meshes": {"seq": 3}}, r"shape \(2, 8\) cannot be cut in 3 along dim 1"),
        ({"cut": {"seq": (1, 1, 1)}}, "does not fit a batch"),
        ({"drivers": "engine"}, "an engine"),
        ({"precisions": "bf16"}, r"precisions=\['bf16'\] on a mesh with names"),
        ({"wires": "int8"}, r"wires=\['int8'\] on a mesh with names"),
        ({"meshes": fzero.Mesh({"data": 2, "seq": 2})["seq"]}, "which is a part of"),
        ({"meshes": "other"}, "or names and sizes"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        certify(**options)
