"""`prove`: a step, a state and its arguments -> a proof about the step on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optree
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from fzero.errors.check import is_count, is_positive, require
from fzero.state import NAMESPACE, Placement
from fzero.state.progress import Phase
from fzero.state.slots import Slot
from fzero.tools.prove._budget import DEFAULT_S, Budget, OutOfBudget
from fzero.tools.prove._check import prove_programs
from fzero.tools.prove._proof import Claim, Proof, line_of
from fzero.tools.prove._record import ProgramRecorder, ranks_of
from fzero.tools.prove._same import same_program
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import require_recordable
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.simulate import require_stacked


def prove(
    step: Callable[..., Any],
    state: Any,
    args: Any = (),
    *,
    world: int | None = None,
    budget_s: float = DEFAULT_S,
) -> Proof:
    """Prove, for all values: new state on W ranks = update(state, (1 / W) sum_r gradient(b_r)).

    `update` and `gradient` are what the step does on one rank alone, b_r is the batch of rank r.

    Programs are recorded as `fzero.trace` does it: of one rank alone, and of ranks among W. Each
    value is read as an expression over parameters, slots and batches: whole, each rank's part of a
    whole, made of a rank's own batch, or a sum over ranks. Where both programs make the same
    expression of every leaf of the new state the theorem holds over the reals, and prints with
    what it assumes. A leaf that is not shown is named, with the line of the graph at which the
    ranks begin to do what one rank does not explain; it may be right all the same.

    Args:
        step: (state, *args) -> (state, aux) with a `fzero.shard`; or `fzero.simulate` of one.
        state: as the step is given it, between two updates. No value of it is read.
        args: the further arguments, a tuple; what is no tuple is the only one. Of a simulated step
            stacked ones, of which rank 0's are read.
        world: W, any number of ranks; default that of the state.
        budget_s: CPU seconds for each rank whose program is recorded. Where they are spent the step
            is not proved, and the op is named at which they were; autograd is let finish first.

    Returns:
        A `Proof`; true if all is shown. Not a collective.

    Raises:
        LayoutError: for a step without `fzero.shard`, a `world` that is no count, batches that are
            not stacked.
        AxisError: for a mesh of two dims, and for local updates.
        PhaseError: for a state with gradients; in a trace or transform; and as `fzero.trace` does,
            for a step that reads values, and an optimizer that cannot be traced.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(step_fn, stage=2)
        >>> state = step.init({"w": torch.ones(5)}, fzero.optim.sgd(1.0))
        >>> fzero.prove(step, state, torch.ones(5), world=1024).proved
        True
    """
    inner: Any = step.inner if isinstance(step, Step) and step.name == "simulate" else step
    if not isinstance(inner, Step) or inner.find_init() is None:
        raise LayoutError(
            f"prove: there is no fzero.shard in {describe_function(step)}.",
            cause="the function that shard is put around, or a step that was called already.",
            fix="fzero.prove(fzero.shard(step_fn, stage=2), state, batch).",
        )
    one, *_ = states = flatten_states("prove", state)[0]
    world = one.setup.axis.size if world is None else world
    require("prove: world", world, is_count, "at least 1")
    if any(x.setup.replicas > 1 or x.outer is not None for x in states):
        raise AxisError(
            f"prove: a state on {one.mesh}, with replicas or local updates.",
            cause="a mesh of two dims, or fzero.local.",
            fix="prove the step on one dim of ranks; try the other with fzero.certify.",
        )
    if in_transform() or is_recorded(()) or any(x.phase is not Phase.IDLE for x in states):
        raise PhaseError(
            "prove: inside of a trace or a transform, or with a state that has gradients.",
            cause="a call within a step.",
            fix="call it between two updates.",
        )
    require_recordable("prove", inner, states)
    given: Any = args if isinstance(args, tuple) else (args,)
    if inner is not step:
        require_stacked("prove", given, one.setup.axis.size)
        given = optree.tree_map(
            lambda x: x[0] if isinstance(x, Tensor) else x, given, namespace=NAMESPACE
        )
    require("prove: budget_s", budget_s, is_positive, "a number of seconds above 0")
    budget = Budget(budget_s, len(ranks_of(world)))
    if own := [name for x in states for name, one in x.slots.items() if _is_own(one)]:
        claim = Claim(tensor=f"state.slots[{own[0]!r}]", leaf="", why=_OWN)
        return Proof(
            step=describe_function(inner), world=world, ranks=(), ops=(0, 0), claims=(claim,)
        )
    with AsFound("prove", inner, state, given) as found:
        recorder = ProgramRecorder(inner, state, given, budget, found)
        return _Attempt(describe_function(inner), recorder, world, budget).proof()


_OWN = "each rank has its own (Placement.PARTIAL, OWNER): it is no part of a state of one rank"


def _is_own(slot: Slot) -> bool:
    return slot.form.lifetime == "run" and slot.form.placement in (
        Placement.PARTIAL,
        Placement.OWNER,
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One proof: the programs are recorded, compared and read, and what is outside is looked at."""

    step: str
    recorder: ProgramRecorder
    world: int
    budget: Budget

    def proof(self) -> Proof:
        try:
            return self._tried()
        except OutOfBudget as error:
            return self._refused(f"{error}")
        except Exception as error:
            if isinstance(error, FzeroError) or not (noted := self.recorder.watch.noted):
                raise
            return self._refused("; ".join(noted))  # of which torch says something else

    def _tried(self) -> Proof:
        record = self.recorder.of
        alone = record(1, 0)
        ranks = (record(self.world, rank) for rank in ranks_of(self.world))
        proof = prove_programs(self.step, alone, ranks, self.world, budget=self.budget)
        if not proof:
            return proof
        # The ranks' programs were compared with each other; that of one rank with that of a later
        # call, in which torch has looked up what it wants to know.
        if (node := same_program(alone, record(1, 0))) is not None:
            return self._refused("a later call has another program", line_of(node))
        noted = self.recorder.watch.noted
        local = tuple(sorted(self.recorder.local))
        return self._refused("; ".join(noted)) if noted else replace(proof, local=local)

    def _refused(self, why: str, line: str = "") -> Proof:
        return Proof(
            step=self.step,
            world=self.world,
            ranks=(),
            ops=(0, 0),
            claims=(Claim(tensor="state", leaf="", why=why, line=line),),
        )
