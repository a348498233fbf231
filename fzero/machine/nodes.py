"""The gradients of several logical ranks on one rank: rows of a window, nodes of the tree, a mean.

    rows     one flat [W l] for each logical rank, added up call by call
    nodes    sums of rows: whole nodes of the tree, as few as there can be
    mean     nodes of all ranks -> the part of each, summed by its owner -> / L

Rows are folded as they come where one call has all that they get, so a rank holds its nodes and one
row more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fzero.collectives import about, start_gather
from fzero.machine.offload import offloaded, to_device
from fzero.machine.reduce import gathered_over, start_nodes
from fzero.ranks.mesh import Axis
from fzero.state import Setup, logical

Row = dict[int, Tensor]
"""{group: the gradient [W l] of one logical rank}."""


class Nodes:
    """The nodes of a rank's logical ranks, whose rows come in order."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self._setup, self._device = setup, device
        self._held: tuple[tuple[logical.Node, Row], ...] = ()
        self._next = setup.carried(setup.axis.rank).start

    def push(self, row: Mapping[int, Tensor], place: int | None = None) -> None:
        """Add the row of the next logical rank, or of that at `place`. It is not written to.

        Those before it that brought nothing have zeros.
        """
        setup = self._setup
        assert setup.logical is not None
        if place is not None:
            self._fill(setup.carried(setup.axis.rank)[place])
        sent = {
            i: setup.sent(i, to_device(x, self._device)).to(setup.accumulate_dtype(i))
            for i, x in row.items()
        }
        node = self._next, self._next + 1
        self._held = logical.push(self._held, node, sent, setup.logical.ranks, _added)
        self._next += 1

    def _fill(self, stop: int) -> None:
        layout = self._setup.layout
        while self._next < stop:
            self.push(
                {
                    i: torch.zeros(
                        layout.full_numel(i),
                        dtype=self._setup.accumulate_dtype(i),
                        device=self._device,
                    )
                    for i in layout.trainable
                }
            )

    def mean(self, axis: Axis) -> Row:
        """Return, and forget, the mean over all logical ranks: {group: this rank's part}.

        A collective over `axis`, which has the ranks of the setup.
        """
        setup = self._setup
        self._fill(setup.carried(setup.axis.rank).stop)
        rows, self._held = [row for _, row in self._held], ()
        means: Row = {}
        # The last first, as in a backward; one at a time, and what was sent is freed.
        for indices in (setup.layout.units[i] for i in reversed(range(len(setup.layout.units)))):
            some = [i for i in indices if i in rows[0]]
            if not some:
                continue
            held = [[row.pop(i) for row in rows] for i in some]
            with about(lambda some=some: setup.layout.paths(some)):
                sums = start_nodes(setup, axis, held, some).wait()
                del held
                for over in gathered_over(setup, axis):
                    sums = start_gather(sums, over).wait()
            for i, total in zip(some, sums, strict=True):
                mean = total if setup.divisor == 1.0 else total.div_(setup.divisor)
                means[i] = offloaded(setup.offload.gradients, mean, setup.offload)
        return means


def _added(earlier: Row, later: Row) -> Row:
    """Return the sum of two nodes, which are given up."""
    return {i: earlier.pop(i) + later.pop(i) for i in [*earlier]}
