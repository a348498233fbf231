"""`vjp`: a function of parameters now, the gradient by its outputs' cotangents later."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Concatenate, NoReturn, final

import optree
import torch
from torch import Tensor

from fzero.context.modes import (
    computed_in,
    explains_inference,
    needs_func,
    require_autograd,
    wants_graph,
)
from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import called_as, require_function_of_params
from fzero.machine.placeholder import without_dynamo
from fzero.optim.recorded import lacks_value
from fzero.ranks.mesh import Axis, MetInLoss, running_on
from fzero.state import NAMESPACE, Layout, TrainState
from fzero.transforms.accumulate import InAxes
from fzero.transforms.autograd import Result, detached
from fzero.transforms.backward_pass import expect_pulls, functional_of, pull_of, raises_together
from fzero.transforms.donation import check_alive, returned
from fzero.transforms.forward import Forward
from fzero.transforms.grad import after_reading, as_read, learning, require_learner
from fzero.transforms.logical_ranks import (
    all_come,
    call_given,
    call_logical_ranks,
    each_call,
    in_turn,
    setup_of,
    stacked,
)
from fzero.transforms.models import (
    S,
    axes_of_loss,
    call_of_states,
    flatten_states,
)
from fzero.transforms.pipeline import P, R
from fzero.transforms.recipe import begun, called


@called_as("out, pull = vjp(fn, state)(batch)")
def vjp(
    fn: Callable[Concatenate[Any, P], R],
    state: Any,
    *,
    wrt: Any = None,
    in_axes: InAxes = 0,
    sizes: Sequence[int] | None = None,
) -> Callable[P, tuple[R, Pull]]:
    """Return v: v(*args) = (out, pull), out = fn(params, *args); pull adds mean_r J_r^T c_r.

    `out` is any pytree of tensors, attached to nothing. `state = pull(state, cotangents)` adds to
    the gradients of the state what `grad_and_reduce` of sum(c * fn(params, *args)) adds, with its
    bits, without another forward. Between the two a rank keeps activations, and no parameters: at
    stage 3 the backward gathers them again, as any does. (Forward mode in `fn` keeps what it reads:
    then, or to keep inputs alone, give it `fzero.remat(fn)`.) So a loss that needs the outputs of
    many forwards at once (contrastive learning, a reward for a whole group) is computed of outputs
    alone, outside of all graphs, and its gradient is pulled back through one forward after another.

    `pull(state, cotangents, weight=None, retain=False)`:

    state: the one that `vjp` was given, or what became of it: other calls may have added gradients,
        and a window may have been opened. The loss scale, transforms and the window are those of
        this state; transforms at `loss` and `check_finite` see sum(c * out).

    cotangents: in the structure of `out`, each with the shape of its output, cast to its dtype.
        None stands for zeros, and is all that an output that is no floating tensor can have. A
        number is one for an output without dims.

    weight: of this call, as in `grad_and_reduce`; of logical ranks one for each of this rank's.

    retain: the graph stays, for more calls of this `pull`. Else it is used up by one.

    Pulls may come in any order, later in the step or in a later call, after other forwards; where
    something crosses ranks the order is the same on all of them. The next update of a state ends
    those that are pending: a rank that did not pull counts as zero, and a later pull raises, unless
    that update was skipped. A pull that never comes costs its activations until it is deleted.

    wrt, in_axes, sizes: as in `grad_and_reduce`. With logical ranks the outputs, and so their
    cotangents, have a first dim of this rank's logical ranks; those of one `state` draw the same
    random numbers in every forward from it, for the forward does not change the state.

    A tensor that requires grad and that `fn` closes over gets its `.grad` by the pull, times the
    loss scale if there is one: so the outputs of one model, `h.requires_grad_()`, go through `fn`
    of the next one, and its pull makes the cotangent `h.grad`.

    For an engine this is ordinary PyTorch: `out = engine(x)`, later `out.backward(c)`.

    Raises `LayoutError` for an `out` or cotangents that are none of these; `PhaseError` for a pull
    that was used, that comes after an update or is given another state, under a torch.func
    transform or make_fx, and for arguments that require grad (use `grad_and_reduce`), and where
    ranks carry several logical ranks and `fn` calls a collective; `MismatchError` on every rank if
    ranks make other forwards, or pull in other orders where something crosses them.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=3)
        >>> out, pull = fzero.vjp(lambda p, x: p["w"] * x, state)(torch.tensor([2.0]))
        >>> state = pull(state, 2 * (out - 5))  # the gradient of (out - 5)^2 by out
        >>> out, fzero.gradients(state)["w"]
        (tensor([6.]), tensor([4.]))
    """
    require_function_of_params("vjp", fn, "out, pull = fzero.vjp(fn, state)(batch)")
    function: Any = fn
    states, treespec = flatten_states("vjp", state)
    learns = [True] * len(states) if wrt is None else learning(wrt, state, states)
    name = call_of_states("vjp", treespec, learns)
    over = axes_of_loss(states, [one.setup.axis for one in states])
    chosen = [one for one, by in zip(states, learns, strict=True) if by]
    setup = setup_of(chosen)
    require_learner(chosen, "vjp")
    with raises_together(setup.axis if setup.logical is not None else None):
        call_given("vjp", setup, None, in_axes, sizes)

    @without_dynamo
    @functools.wraps(fn, updated=())
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        require_autograd("vjp")
        for one in states:
            check_alive(one)
        _refuse_func(states, (args, kwargs))
        numbers = expect_pulls(states)  # also of one that raises: ranks have made as many
        pairs = zip(states, learns, strict=True)
        read = [begun(one) if by else as_read(one) for one, by in pairs]

        def run(args: Any, kwargs: Any) -> tuple[Any, Any, Forward]:
            def call(params: list[Any]) -> Any:
                with computed_in(states[0].setup.policy.autocast, states[0].device):
                    made = function(optree.tree_unflatten(treespec, params), *args, **kwargs)
                return optree.tree_map(_output, made, namespace=NAMESPACE)

            graph = Forward(read, replace(functional_of(read, name), lazy=True))
            with graph.in_step():
                attached = graph.forward(call)
                out = detached(attached, states)
                graph.end()
            return out, attached, graph

        with running_on(*over), explains_inference((args, kwargs)):
            if setup.logical is None:
                made = [run(args, kwargs)]
                out = made[0][0]
            else:
                made = list[tuple[Any, Any, Forward]]()
                with raises_together(setup.axis):
                    each = each_call("vjp", fn, setup, (args, kwargs), None, in_axes, sizes)
                    for place, (args, kwargs, _) in enumerate(each):
                        with in_turn(chosen[0], place):
                            made.append(_without_collectives(run, args, kwargs))
                    out = stacked([out for out, *_ in made], "vjp")
                    if any(one.setup.gathers_by_unit and one.setup.carries_several for one in read):
                        all_come("after a forward", read)
        graphs = [(attached, graph) for _, attached, graph in made]
        return out, Pull(graphs, out, states, (treespec, learns), numbers)

    return forward


def _refuse_func(states: Sequence[TrainState], arguments: Any) -> None:
    flats = [flat for one in states for flat in one.params.flats]
    leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
    if needs_func(flats) or wants_graph([*flats, *leaves]):
        raise PhaseError(
            "vjp under a torch.func transform, recorded by make_fx, or with an argument that "
            "requires grad.",
            cause="a step that is differentiated or mapped as a whole; or a batch that "
            "another model made.",
            fix="call grad_and_reduce of sum(c * out) there, whose result can be differentiated; "
            "or give the function batch.detach().",
        )


def _without_collectives(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return run(args, kwargs)
    except MetInLoss as met:
        raise PhaseError(
            "vjp: the function calls a collective, and ranks carry several logical ranks: those "
            "of this rank run one after another.",
            cause="psum, all_gather and the like in fn, of a state with logical_ranks=.",
            fix="call it outside, of the outputs of fn; or use grad_and_reduce, which runs them "
            "together.",
        ) from met.error


def _output(x: Any) -> Any:
    if not isinstance(x, Tensor):
        raise LayoutError(
            f"vjp: an output is a {type(x).__name__}, {x!r:.60}.",
            cause="a number, a text or the object of another library among the outputs.",
            fix="return a pytree of tensors: torch.tensor(x), or the logits of a model's output.",
        )
    return x


@final
class Pull:
    """The backward of one call of `vjp`, which is yet to come: (state, cotangents) -> state.

    A value of this process; see `fzero.vjp`.
    """

    __slots__ = ("_graphs", "_numbers", "_out", "_setups", "_tree")

    def __init__(
        self,
        graphs: Sequence[tuple[Any, Forward]],
        out: Any,
        states: Sequence[TrainState],
        form: tuple[optree.PyTreeSpec, Sequence[bool]],
        numbers: Mapping[Any, Any],
    ) -> None:
        self._graphs: Sequence[tuple[Any, Forward]] | None = graphs
        leaves, treespec = optree.tree_flatten(out, namespace=NAMESPACE)
        self._out = treespec, [(x.shape, x.dtype, x.device) for x in leaves]
        self._setups = [(one.setup, one.step) for one in states]
        self._tree, self._numbers = form, numbers

    def __repr__(self) -> str:
        used = " (used)" if self._graphs is None else ""
        return f"Pull of {len(self._out[1])} outputs{used}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PhaseError(
            f"{self!r} is to be pickled or copied.",
            cause="torch.save, a data loader's worker or copy.deepcopy of what holds it; it is the "
            "graph of a forward of this process.",
            fix="pull before it is saved, and save the state.",
        )

    def __call__(self, state: S, cotangents: Any, weight: Any = None, retain: bool = False) -> S:
        """Return the state with the gradient of sum(c * out) added."""
        require_autograd("pull")
        states, treespec = flatten_states("pull", state)
        for one in states:
            check_alive(one)
        spec, learns = self._tree
        over = axes_of_loss(states, [one.setup.axis for one in states])
        chosen = [one for one, by in zip(states, learns, strict=False) if by] or states
        setup = setup_of(chosen)
        with ExitStack() as together:
            for axis in dict.fromkeys(one.setup.axis for one in states):
                together.enter_context(raises_together(axis))
            graphs = self._require_graphs()
            self._require_states(states, treespec)
            count = 0 if setup.logical is None else len(graphs)
            by_graph = _cotangents(*self._out, cotangents, count, len(graphs))
            if callable(weight):
                raise LayoutError(
                    "pull: weight is a function.",
                    cause="a function of a part of the arguments, as grad_and_reduce takes it: the "
                    "forward, which had them, is over.",
                    fix="give a number; of logical ranks one for each of this rank's.",
                )
            given = call_given("pull", setup, weight, 0, None)
            several = isinstance(weight, list | tuple) or getattr(weight, "ndim", 0)
            weights: list[Any] = [*weight] if several else [weight] * len(graphs)
        _refuse_func(states, ())
        form = pull_of(states, call_of_states("pull", treespec, learns), self._numbers)
        pairs = [*zip(states, learns, strict=True)]

        def pulled(place: int, states: Sequence[TrainState]) -> tuple[list[TrainState], Result]:
            attached, graph = graphs[place]
            outs = optree.tree_leaves(attached, namespace=NAMESPACE)
            graph.resume(states, form)
            try:
                with graph.in_step():
                    loss = _loss(states, outs, by_graph[place])
                    if text := graph.backward(loss, weights[place], retain=retain):
                        warnings.warn(text, UserWarning, stacklevel=3)
                    new = graph.finish()
            finally:
                graph.rest()
            return new, Result(grads=(), value=loss.detach(), aux=None)

        if not retain:
            self._graphs = None
        with running_on(*over):
            known = [called(begun(one), given) if by else as_read(one) for one, by in pairs]
            if setup.logical is None:
                new, _ = pulled(0, known)
            else:
                new, _ = call_logical_ranks(pulled, known, learns, weights, form)
        new = [
            made if by else after_reading(one, made)
            for (one, by), made in zip(pairs, new, strict=True)
        ]
        returned(new, gradients=True, name="pull", given=states)
        pulled_states: Any = optree.tree_unflatten(spec, new)
        return pulled_states

    def _require_graphs(self) -> Sequence[tuple[Any, Forward]]:
        if self._graphs is None:
            raise PhaseError(
                f"{self!r} was called before.",
                cause="a second backward through one forward, whose graph the first one has freed.",
                fix="run vjp again, or pull(state, cotangents, retain=True) for all but the last.",
            )
        return self._graphs

    def _require_states(self, states: Sequence[TrainState], treespec: optree.PyTreeSpec) -> None:
        forms = [(one.setup.layout, one.setup.stage, one.setup.axis) for one in states]
        known = [(setup.layout, setup.stage, setup.axis) for setup, _ in self._setups]
        (spec, _), pairs = self._tree, zip(forms, known, strict=False)
        is_known = all(form == one and form[0] is one[0] for form, one in pairs)
        if treespec != spec or not is_known:
            raise PhaseError(
                f"{self!r} was given {_seen(treespec, forms)}, and vjp {_seen(spec, known)}.",
                cause="the state of another model, which may be an equal one, or one that was "
                "resharded or unpickled since.",
                fix="give it the state that vjp was given, or what became of it in this step.",
            )
        for one, (_, step) in zip(states, self._setups, strict=True):
            if one.step is step:  # the host does not wait for a number on a device
                continue
            counts = [None if lacks_value(x) else int(x) for x in (step, one.step)]
            if counts[0] != counts[1] or None in counts:
                raise PhaseError(
                    f"{self!r}: the state was updated since: vjp was at update {counts[0]}, and "
                    f"it is at update {counts[1]}.",
                    cause="apply_gradients between vjp and its pull: the activations are those of "
                    "parameters that are gone.",
                    fix="pull before the update, or run vjp again after it.",
                )


def _seen(treespec: optree.PyTreeSpec, forms: Sequence[tuple[Layout, int, Axis]]) -> str:
    parts = [f"{layout.summary}, at stage {stage} on {axis}" for layout, stage, axis in forms]
    name = "a state" if treespec.num_nodes == 1 else call_of_states("states", treespec)
    return f"{name} ({'; '.join(parts)})"


def _cotangents(
    treespec: optree.PyTreeSpec,
    known: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
    cotangents: Any,
    rows: int,
    count: int,
) -> list[list[Tensor | None]]:
    """Return the cotangents of each of `count` graphs, cast; raise `LayoutError` for a misfit.

    rows: how many logical ranks the outputs have rows of; 0 if they have none.
    """
    try:
        found: Any = treespec.flatten_up_to(cotangents)
    except ValueError as error:
        raise LayoutError(
            f"pull: the cotangents do not fit the outputs: {error!s:.300}",
            cause="another structure than fn returned, such as one tensor for a tuple of one.",
            fix="give a pytree in the structure of `out`, with a tensor, or None for zeros, for "
            "each of its tensors.",
        ) from None
    paths = treespec.paths()
    made = [
        _cast("".join(f"[{key!r}]" for key in path), c, *of)
        for path, c, of in zip(paths, found, known, strict=True)
    ]
    if not rows:
        return [made]
    return [[None if c is None else c[i] for c in made] for i in range(count)]


def _cast(
    path: str, c: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if c is None:
        return None
    if isinstance(c, int | float) and not isinstance(c, bool) and not shape:
        c = torch.tensor(c, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        seen = f"is not None, and the output is {dtype}"
    elif not isinstance(c, Tensor):
        seen = f"is a {type(c).__name__}"
    elif c.shape != shape or c.device != device:
        seen = f"has shape {[*c.shape]} on {c.device}, and the output {[*shape]} on {device}"
    else:  # a backward keeps it, which torch refuses of one of inference mode
        return (c.clone() if c.is_inference() else c.detach()).to(dtype)
    raise LayoutError(
        f"pull: the cotangent of out{path} {seen}.",
        cause="the gradient of a loss by something else than `out`, or of a part of it.",
        fix="give torch.func.grad(loss)(out), or None for an output that the loss does not use.",
    )


def _loss(
    states: Sequence[TrainState], outs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Tensor:
    """sum(c * out), over all outputs that have a cotangent."""
    pairs = zip(outs, cotangents, strict=True)
    with torch.enable_grad(), computed_in(states[0].setup.policy.autocast, states[0].device):
        parts = [(x * c).sum() for x, c in pairs if c is not None]
        return sum(parts[1:], parts[0]) if parts else torch.zeros((), device=states[0].device)
