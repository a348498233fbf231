"""Muon: momentum stays in even flats; owners orthogonalize whole matrices, which cross in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import called_as, is_count, require
from fzero.machine.offload import change, cloned, to_device
from fzero.machine.owners import Owners, Wholes
from fzero.machine.stacks import check_batch_dims, in_matrices
from fzero.machine.tree_sum import one_thread
from fzero.optim.encoded_moments import Flats, written_back
from fzero.optim.optimizer import (
    Groups,
    LeafTest,
    Optimizer,
    OptimizerState,
    Schedule,
    after_update,
    at,
    copied,
    not_differentiable,
    overrides_of,
    shown,
)
from fzero.optim.per_leaf_step_counts import parted
from fzero.optim.precision import precision_of
from fzero.optim.rules import Rule, never
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.layout import Leaf, learns
from fzero.state.stateful_update import Piece

Split = Callable[[Leaf], Sequence[int] | None]
"""leaf -> the rows of each matrix that it is made of; None: it is one matrix."""

RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _unused(*_: Any) -> Any:
    raise NotImplementedError("muon has no rule for single elements; see Muon.advance")


MUON = Rule(
    name="muon",
    moments=("momentum_buffer",),
    formula=_unused,  # there is none for elements
    kernel=_unused,
    skips=never,
)


@called_as("muon(0.02)")
def muon(
    lr: float | Schedule = 1e-3,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    adjust_lr: str = "original",
    split: Split | None = None,
    batch_dims: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
) -> Muon:
    """b = momentum b + (1 - momentum) g,  p' = (1 - lr weight_decay) p - lr r NS(u).

    u = (1 - momentum) g + momentum b, or b without `nesterov`; NS(u) is U V^T of u = U S V^T,
    nearly: `ns_steps` of Newton and Schulz. r = sqrt(max(1, rows / columns)). The numbers are those
    of torch.optim.Muon, bit for bit.

    It is for matrices, and stacks of them. Give vectors, embeddings and heads another rule, with
    `fzero.optim.partition`. Momentum and masters
    stay in flats that are cut evenly. At an update, u crosses to the ranks that own whole matrices,
    in `dtype`, and NS(u) comes back: 2 M (W - 1) / W elements of M in all. An owner iterates
    matrices of one shape together.

    Args:
        lr: a number, or a schedule (updates made so far) -> number.
        momentum: how much of b an update keeps.
        nesterov: whether u looks one update ahead.
        weight_decay: 0 for none; it is decoupled, as in `adamw`.
        ns_steps: of Newton and Schulz.
        adjust_lr: "original", the r above; "match_rms_adamw" for r = 0.2 sqrt(max(rows, columns)),
            with which a learning rate of AdamW can be used.
        split: leaf -> rows of each matrix that it is made of, or None: [d, d, d] for a fused QKV
            [3 d, d], of which each is orthogonalized by itself.
        batch_dims: of parameters of 3 or more dims, how many of the first count matrices: 1 for a
            stack of experts [E, out, in], each of which is then one by itself; 0 for one matrix of
            the first dim by the others. None: convolutions of torch.nn are one, others raise.
        dtype: in which it iterates, and in which u crosses ranks.
        decay_mask: as in `adamw`.
        groups: as in `adamw`.
        master_weights: as in `adamw`.

    Returns:
        The optimizer, for `fzero.init`, `step.init`, `Engine` and `fzero.optim.partition`. An
        update by it cannot be differentiated or traced.

    Raises:
        LayoutError: for an option of another kind; when a state is made, for a parameter that is
            no matrix, or a `split` that does not fit it.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et
    al., "Muon is scalable for LLM training", arXiv 2502.16982.

    Example:
        >>> import torch
        >>> opt = muon(0.5, weight_decay=0.0)
        >>> p, g = [torch.zeros(2, 2)], [torch.tensor([[3.0, 0.0], [0.0, 3.0]])]
        >>> update = opt.update(g, opt.init(p), p)[0][0]
        >>> bool(update[0, 0] == update[1, 1]), bool(update[0, 0] < -0.3), bool(update[0, 1] == 0)
        (True, True, True)
    """
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    options |= {"ns_steps": ns_steps, "adjust_lr": adjust_lr}
    overrides = overrides_of("muon", options, decay_mask, groups)
    for some in (options, *(dict(changes) for _, changes in overrides)):
        steps, way = some.get("ns_steps", 5), some.get("adjust_lr", "original")
        require("muon: ns_steps", steps, lambda x: is_count(x) and x < 100, "1 to 99")
        require("muon: adjust_lr", way, RATIOS.__contains__, " or ".join(map(repr, RATIOS)))
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require("muon: dtype", dtype, lambda _: is_float, "a floating torch.dtype")
    check_batch_dims("muon", batch_dims)
    require("muon: split", split, lambda x: x is None or callable(x), "leaf -> rows, or None")
    return Muon(
        rule=MUON,
        options=tuple(options.items()),
        overrides=overrides,
        precision=precision_of("muon", master_weights, None, False),
        dtype=dtype,
        split=split,
        batch_dims=batch_dims,
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Muon(Optimizer):
    """What `fzero.optim.muon` returns."""

    dtype: torch.dtype = torch.bfloat16
    split: Split | None = None
    batch_dims: int | None = None

    @property
    def elementwise(self) -> bool:
        """Return False: it needs whole matrices."""
        return False

    @property
    def leafwise(self) -> bool:
        """Return True: each matrix is updated alone."""
        return True

    def bind(self, params: Mapping[str, Tensor]) -> Muon:
        """Return itself; raise `LayoutError` for what learns and is no matrix, or no such split."""
        for path, p in params.items():
            if learns(p):
                leaf = Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
                self.rows_of(leaf)
        return self

    def batch_dims_of(self, path: str) -> tuple[str, int | None]:
        """Return what it was told of stacks of matrices."""
        return "muon", self.batch_dims

    def rows_of(self, leaf: Leaf) -> Sequence[int]:
        """Return the rows of each matrix that a leaf is made of, one under another."""
        count, shape = in_matrices(leaf.shape, self.batch_dims)
        if len(leaf.shape) < 2:
            raise LayoutError(
                f"muon: {leaf.path} has the shape {leaf.shape}, and is no matrix.",
                cause="all parameters of a model were given to a rule for matrices.",
                fix="give vectors another rule: fzero.optim.partition({'matrices': "
                "fzero.optim.muon(lr), 'rest': fzero.optim.adamw(lr)}, lambda leaf: 'matrices' if "
                "len(leaf.shape) == 2 else 'rest'); embeddings and heads, by their paths, too.",
            )
        rows = None if self.split is None else self.split(leaf)
        if rows is not None and (not all(map(is_count, rows)) or sum(rows) != shape[0]):
            raise LayoutError(
                f"muon: split gave {rows!r} for {leaf.path}, which has {shape[0]} rows.",
                cause="the number of the matrices, or the columns, in the place of their rows.",
                fix="return the rows of each, [d, d, d] for a fused QKV of [3 d, d], or None.",
            )
        return count * ([shape[0]] if rows is None else list(rows))

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerState,
        pieces: Sequence[Piece],
        *,
        differentiable: bool = False,
        owned: bool = False,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
        device: torch.device | None = None,
        unused: frozenset[str] = frozenset(),
        owners: Owners | None = None,
        apart: bool = False,
    ) -> tuple[list[Tensor], OptimizerState]:
        """Return (params', state'), as `Optimizer.advance` does.

        `owners`: which rank has which matrix whole; without them, each piece is a whole matrix.
        `apart`: each matrix is computed by itself; else those of one shape in one batch.

        Raises:
            PhaseError: if the update is to be differentiated or traced.
        """
        if differentiable:
            raise not_differentiable(self, "it exchanges whole matrices between ranks")
        now = parted(state.apart, unused, lambda path: 0, 1 + len(state.steps))
        with torch.no_grad():
            if not owned:
                copy = partial(cloned, device=device)
                params, state = [copy(p) for p in params], copied(state, copy)
            still = {path for path, number in now.apart if number in now.still}
            moved = [p for p in pieces if p.start < p.stop and p.leaf.path not in still]
            flats = Flats(params, grads, state.masters, self.slots(state))
            self._step(flats, moved, still, state.count, owners, device, apart=apart)
        return list(params), after_update(state, now, None)

    def _step(
        self,
        flats: Flats,
        moved: Sequence[Piece],
        still: Collection[str],
        count: Tensor,
        owners: Owners | None,
        device: torch.device | None,
        *,
        apart: bool,
    ) -> None:
        """Step this rank's flats in place.

        moved: the pieces of the leaves that this update moves. still: the paths of all others.
        """

        def on(x: Tensor) -> torch.device:
            return device or x.device

        def options_of(leaf: Leaf) -> dict[str, Any]:
            return at({**dict(self.options), **self._changes(self._override_of(leaf))}, count)

        # The momentum b moves, and gives u of each flat.
        updates = [torch.zeros(p.shape, dtype=self.dtype, device=on(p)) for p in flats.params]

        def move(b: Tensor, g: Tensor, u: Tensor, o: Mapping[str, Any]) -> None:
            b.lerp_(g, 1 - o["momentum"])
            u.copy_(g.lerp(b, o["momentum"]) if o["nesterov"] else b)

        with one_thread(apart):
            for index, leaf, start, stop, _ in moved:
                work, u = flats.steps(index), updates[index][start:stop]
                g = to_device(flats.grads[index][start:stop], on(work), work.dtype)
                held = flats.slots["momentum_buffer"][index][start:stop]
                change(held, on(work), partial(move, g=g, u=u, o=options_of(leaf)))

        # Owners make NS(u) of it.
        def orthogonalize(
            leaves: Sequence[Leaf], mine: list[int], wholes: Wholes
        ) -> dict[int, Tensor]:
            made, by_steps = {k: wholes[k][0] for k in mine}, dict[int, list[int]]()
            for k in mine:
                if leaves[k].path not in still:
                    by_steps.setdefault(options_of(leaves[k])["ns_steps"], []).append(k)
            for steps, some in by_steps.items():
                rows = {k: list(self.rows_of(leaves[k])) for k in some}
                parts = {k: made[k].view(sum(rows[k]), -1).split(rows[k]) for k in some}
                every = [part for k in some for part in parts[k]]
                # A product of a batch may round otherwise than that of one matrix.
                batches = [[part] for part in every] if apart else [every]
                rest = iter([x for batch in batches for x in orthogonalized(batch, steps=steps)])
                for k in some:
                    made[k] = torch.cat([next(rest).reshape(-1) for _ in parts[k]])
            return made

        if owners is not None:
            compute = partial(orthogonalize, [one.leaf for one in owners.leaves])
            owners.at((), on(updates[0])).run([updates], compute, updates)
        else:
            wholes = {
                k: [updates[index][start : start + leaf.numel]]
                for k, (index, leaf, start, *_) in enumerate(moved)
            }
            made = orthogonalize([piece.leaf for piece in moved], [*wholes], wholes)
            for k, (whole,) in wholes.items():
                whole.copy_(made[k])

        # Decay, and lr r NS(u), are taken from what is stepped.
        def step(p: Tensor, piece: Piece) -> None:
            o, (index, leaf, start, stop, first) = options_of(piece.leaf), piece
            p.mul_(1 - o["lr"] * o["weight_decay"])
            every, begin = self.rows_of(leaf), 0
            columns = leaf.numel // sum(every) if leaf.numel else 1
            for rows in every:  # of each matrix of the leaf
                end = begin + rows * columns
                low, high = max(begin - first, 0), min(end - first, stop - start)
                if low < high:
                    own, u = p[low:high], updates[index][start + low : start + high]
                    moves = -(o["lr"] * RATIOS[o["adjust_lr"]](rows, columns))
                    # No whole blocks: in fp32 no element rounds otherwise than others.
                    if apart and own.dtype in SIXTEEN_BIT:
                        own.copy_(own.float().add_(u, alpha=moves))
                    else:
                        own.add_(u, alpha=moves)
                begin = end

        with one_thread(apart):
            for piece in moved:
                home = flats.steps(piece.index)
                change(home[piece.start : piece.stop], on(home), partial(step, piece=piece))
            for index in range(len(flats.params)):
                written_back(flats, index, flats.steps(index))

    def __repr__(self) -> str:
        split = "" if self.split is None else f" split by {shown(self.split)}"
        stack = "" if self.batch_dims is None else f" with batch_dims={self.batch_dims}"
        return f"{Optimizer.__repr__(self)} in {self.dtype}{split}{stack}"


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrices: Sequence[Tensor], *, steps: int = 5) -> list[Tensor]:
    """Return U V^T, nearly, of each M = U S V^T [n, m], in its dtype.

    X <- a X + (b X X^T + c (X X^T)^2) X, `steps` times from X = M / |M|: matrices of one shape in
    one batch.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the bits
    are those of torch.optim.Muon.

    Example:
        >>> import torch
        >>> (x,) = orthogonalized([torch.diag(torch.tensor([3.0, 2.0]))], steps=9)
        >>> bool((x.diagonal() - 1).abs().max() < 0.4)
        True
    """
    a, b, c = COEFFICIENTS
    by_shape: dict[torch.Size, list[int]] = {}
    for i, m in enumerate(matrices):
        by_shape.setdefault(m.shape, []).append(i)
    found: dict[int, Tensor] = {}
    for shape, some in by_shape.items():
        tall = shape[0] > shape[1]
        given = [matrices[i].mT if tall else matrices[i] for i in some]
        # Each norm by itself: that of a batch is summed in another order.
        norms = torch.stack([m.norm().clamp(min=1e-7) for m in given])
        x = torch.stack([matrices[i] for i in some])
        x = (x.mT if tall else x).div_(norms[:, None, None])
        for _ in range(steps):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        found.update(zip(some, (x.mT if tall else x).unbind(), strict=True))
    return [found[i] for i in range(len(matrices))]
