"""`muon`: its options."""

from __future__ import annotations

import torch

from fzero.errors.check import is_count, require
from fzero.optim._make import Groups, overrides_of
from fzero.optim._muon_rule import MUON, RATIOS, Muon, Split
from fzero.optim._optimizer import LeafTest, Schedule
from fzero.optim._precision import precision_of


def muon(
    lr: float | Schedule = 1e-3,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    adjust_lr: str = "original",
    split: Split | None = None,
    dtype: torch.dtype = torch.bfloat16,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
) -> Muon:
    """b = momentum b + (1 - momentum) g,  p' = (1 - lr weight_decay) p - lr r NS(u).

    u = (1 - momentum) g + momentum b, or b without `nesterov`; NS(u) is U V^T of u = U S V^T,
    nearly: `ns_steps` of Newton and Schulz. r = sqrt(max(1, rows / columns)). The numbers are those
    of torch.optim.Muon, bit for bit.

    It is for matrices; a parameter of more dims is one of its first dim by the others. Give
    vectors, embeddings and heads another rule, with `fzero.optim.partition`. Momentum and masters
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
    require("muon: split", split, lambda x: x is None or callable(x), "leaf -> rows, or None")
    return Muon(
        rule=MUON,
        options=tuple(options.items()),
        overrides=overrides,
        precision=precision_of("muon", master_weights, None, False),
        dtype=dtype,
        split=split,
    )
