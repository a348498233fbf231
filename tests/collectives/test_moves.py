"""all_to_all along any dims and by sizes, ppermute of some ranks: values, adjoints, derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import AxisError, FzeroError, LayoutError, MismatchError, PhaseError
from tests.collectives.maps import simulated
from tests.collectives.test_traced import collectives_in
from tests.ranks import run_ranks
from tests.strategies import integers, same, seeds, worlds

on_gloo = pytest.mark.xdist_group("gloo")


@given(ranks=worlds, split=st.integers(-3, 2), concat=st.integers(-3, 2), seed=seeds)
def test_any_dims_can_be_split_and_put_together(
    ranks: int, split: int, concat: int, seed: int
) -> None:
    """Its transpose has the dims swapped, and takes back what it has done."""
    shape = [2, 3, 1]
    shape[split] *= ranks
    xs = integers((ranks, *shape), seed)
    chunks = [x.chunk(ranks, split) for x in xs]
    want = torch.stack([torch.cat([some[r] for some in chunks], concat) for r in range(ranks)])

    def there(x: Tensor) -> Tensor:
        return fzero.all_to_all(x, split_dim=split, concat_dim=concat)

    def back(y: Tensor) -> Tensor:
        return fzero.all_to_all(y, split_dim=concat, concat_dim=split)

    same(simulated(there, xs), want)
    same(simulated(back, want), xs)
    ys = integers(want.shape, seed + 1)
    pulled = simulated(lambda x, y: torch.func.vjp(there, x)[1](y)[0], xs, ys)
    same(pulled, simulated(back, ys))


def test_on_ulysses_shapes_a_rank_gets_all_of_the_sequence_and_some_heads() -> None:
    q = torch.arange(2 * 8 * 4 * 3.0).view(2, 8, 4, 3)  # batch, sequence, heads, width
    pieces = torch.stack(q.chunk(2, 1))
    got = simulated(lambda x: fzero.all_to_all(x, split_dim=2, concat_dim=1), pieces)
    same(got, torch.stack(q.chunk(2, 2)))


perms = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.permutations(range(ranks)),
        st.permutations(range(ranks)),
        st.integers(0, ranks),
    )
)


@given(drawn=perms, seed=seeds)
def test_a_rank_that_nobody_sends_to_gets_zeros(drawn: Any, seed: int) -> None:
    ranks, sources, destinations, count = drawn
    perm = list(zip(sources, destinations, strict=True))[:count]
    xs, ys = integers((ranks, 2), seed), integers((ranks, 2), seed + 1)
    want = torch.zeros_like(xs)
    for s, d in perm:
        want[d] = xs[s]
    same(simulated(lambda x: fzero.ppermute(x, perm), xs), want)
    inverse = [(d, s) for s, d in perm]
    pulled = simulated(
        lambda x, y: torch.func.vjp(lambda x: fzero.ppermute(x, perm), x)[1](y)[0], xs, ys
    )
    same(pulled, simulated(lambda y: fzero.ppermute(y, inverse), ys))
    same((want * ys).sum(), (xs * pulled).sum())


# Uneven: counts[s][r] rows go from rank s to rank r.

matrices = worlds.flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n)
)


def padded(counts: list[list[int]], seed: int) -> Tensor:
    """Each rank's rows, and behind them rows that it does not send."""
    most = max(sum(row) for row in counts)
    return integers((len(counts), most, 2), seed, bound=2)


def moved(counts: list[list[int]], xs: Tensor) -> list[Tensor]:
    """What each rank gets, by a formula."""
    pieces = [x[: sum(row)].split(row) for x, row in zip(xs, counts, strict=True)]
    return [torch.cat([some[r] for some in pieces]) for r in range(len(counts))]


def objective(xs: Tensor, counts: list[list[int]]) -> Tensor:
    """sum_r L_r with L_r = sum_i (i + r + 1) y_i^3 over the rows y_i that rank r gets."""
    return sum((_loss(y, r) for r, y in enumerate(moved(counts, xs))), xs.new_zeros(()))


def _loss(y: Tensor, rank: int) -> Tensor:
    weights = torch.arange(len(y), dtype=y.dtype) + rank + 1
    return (weights[:, None] * y**3).sum()


def loss_by_sizes(x: Tensor, counts: list[list[int]], *, as_tensor: bool = False) -> Tensor:
    """L_r on this rank."""
    rank = fzero.axis_index()
    sizes: Any = torch.tensor(counts[rank]) if as_tensor else counts[rank]
    y, received = fzero.all_to_all(x[: sum(counts[rank])], sizes=sizes)
    assert isinstance(received, Tensor) == as_tensor
    assert list(received) == [row[rank] for row in counts]
    return _loss(y, rank)


def back_and_forth(x: Tensor, counts: list[list[int]]) -> Tensor:
    """What a rank has sent comes back in order; the other rows stay."""
    rank = fzero.axis_index()
    n = sum(counts[rank])
    y, received = fzero.all_to_all(x[:n], sizes=counts[rank])
    again, sent = fzero.all_to_all(y, sizes=received)
    assert sent == counts[rank]
    return torch.cat([again, x[n:]])


@given(counts=matrices, as_tensor=st.booleans(), seed=seeds)
def test_rows_by_sizes_and_all_their_derivatives(
    counts: list[list[int]], as_tensor: bool, seed: int
) -> None:
    """Also where a rank sends or gets nothing, or one gets everything."""
    check_uneven(counts, padded(counts, seed), padded(counts, seed + 1), as_tensor=as_tensor)


def check_uneven(
    counts: list[list[int]], xs: Tensor, vs: Tensor, *, as_tensor: bool = False
) -> None:
    def loss(x: Tensor) -> Tensor:
        return loss_by_sizes(x, counts, as_tensor=as_tensor)

    def hvp(x: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]

    def twice(x: Tensor, v: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad((g * v).sum(), x)[0]

    gradient = torch.func.grad(objective)(xs, counts)
    curved = torch.func.jvp(lambda xs: torch.func.grad(objective)(xs, counts), (xs,), (vs,))[1]
    same(simulated(torch.func.grad(loss), xs), gradient)
    same(simulated(hvp, xs, vs), curved)
    same(simulated(twice, xs, vs), curved)
    same(simulated(lambda x: back_and_forth(x, counts), xs), xs)


def test_rows_by_sizes_under_vmap() -> None:
    counts = [[1, 2], [0, 3]]
    xs = integers((2, 5, 3, 2), 1)  # a sample is along dim 1

    def moves(x: Tensor) -> Tensor:
        return fzero.all_to_all(x, sizes=counts[fzero.axis_index()])[0].sum()

    got = simulated(torch.func.vmap(moves, in_dims=0), xs)
    want = [[moved(counts, xs[:, b])[r].sum() for b in range(5)] for r in range(2)]
    same(got, torch.tensor(want))
    grads = simulated(torch.func.vmap(torch.func.grad(moves)), xs)
    same(grads, torch.ones_like(xs))


def test_rows_by_sizes_along_another_dim() -> None:
    counts = [[1, 2], [3, 0]]
    xs = integers((2, 2, 3), 1)

    def moves(x: Tensor) -> Tensor:
        sizes = counts[fzero.axis_index()]
        y, _ = fzero.all_to_all(x, split_dim=1, concat_dim=-1, sizes=sizes)
        return torch.nn.functional.pad(y, (0, 4 - y.shape[1]))

    want = [torch.cat([xs[0, :, :1], xs[1]], 1), torch.nn.functional.pad(xs[0, :, 1:], (0, 2))]
    same(simulated(moves, xs), torch.stack(want))


# pmax, pmin


@given(ranks=worlds, seed=seeds)
def test_extrema(ranks: int, seed: int) -> None:
    xs = integers((ranks, 3, 2), seed)
    for fn, want in ((fzero.pmax, xs.amax(0)), (fzero.pmin, xs.amin(0))):
        same(simulated(fn, xs), want.expand_as(xs))
        same(simulated(torch.func.vmap(fn, in_dims=1), xs), want.mT.expand(ranks, 2, 3))
    bits = xs > 0
    same(simulated(fzero.pmax, bits), bits.any(0).expand_as(bits))


def test_a_nan_of_any_rank_is_the_extremum() -> None:
    for at in range(3):
        xs = torch.tensor([1.0, 2.0, 3.0])
        xs[at] = float("nan")
        assert simulated(fzero.pmax, xs).isnan().all()
        assert simulated(fzero.pmin, xs).isnan().all()


DERIVATIVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
    "autograd": lambda f, x: f(x.clone().requires_grad_()),
}


@pytest.mark.parametrize("name", ["pmax", "pmin"])
@pytest.mark.parametrize("way", DERIVATIVES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_extrema_are_not_differentiated(ranks: int, way: str, name: str) -> None:
    fn = getattr(fzero, name)
    xs = torch.ones(ranks, 2)
    with pytest.raises(PhaseError, match=rf"{name} of a tensor that is diff.*\n.*\nFix.*detach"):
        simulated(lambda x: DERIVATIVES[way](lambda x: fn(x).sum(), x), xs)
    simulated(lambda x: DERIVATIVES[way](lambda x: (x * fn(x.detach())).sum(), x), xs)
    with torch.no_grad():
        simulated(lambda x: fn(x.requires_grad_()), xs.clone())


# Errors: each says what was seen, and leaves the ranks in step.

WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "a dim": (
        lambda x: fzero.all_to_all(x, split_dim=1),
        LayoutError,
        r"dim 1 of shape \(2, 3\) does not divide by the 2 ranks",
    ),
    "a scalar": (lambda x: fzero.all_to_all(x.sum()), LayoutError, "all_to_all got a scalar"),
    "too few sizes": (lambda x: fzero.all_to_all(x, sizes=[2]), LayoutError, r"sizes=\[2\] of 2"),
    "a sum": (lambda x: fzero.all_to_all(x, sizes=[2, 1]), LayoutError, r"sizes=\[2, 1\] of 2"),
    "below 0": (lambda x: fzero.all_to_all(x, sizes=[3, -1]), LayoutError, r"sizes=\[3, -1\]"),
    "fractions": (
        lambda x: fzero.all_to_all(x, sizes=torch.tensor([1.0, 1.0])),
        LayoutError,
        "sizes=a tensor of torch.float32",
    ),
    "two dims": (
        lambda x: fzero.all_to_all(x, split_dim=0, concat_dim=1, sizes=[1, 1]),
        LayoutError,
        "split_dim=0 and concat_dim=1",
    ),
    "sizes of samples": (
        lambda x: torch.func.vmap(lambda s: fzero.all_to_all(x, sizes=s))(torch.ones(3, 2).long()),
        PhaseError,
        "sizes under torch.func.vmap",
    ),
    "no pairs": (lambda x: fzero.ppermute(x, [1, 0]), AxisError, "is no list of pairs"),  # type: ignore
    "another rank": (lambda x: fzero.ppermute(x, [(0, 2)]), AxisError, "rank 2 of perm"),
    "two sources": (
        lambda x: fzero.ppermute(x, [(0, 1), (1, 1)]),
        AxisError,
        "rank 1 .* is a destination twice",
    ),
    "two destinations": (
        lambda x: fzero.ppermute(x, [(0, 1), (0, 0)]),
        AxisError,
        "rank 0 .* is a source twice",
    ),
    "complex": (lambda x: fzero.pmax(x + 1j), LayoutError, r"got a tensor of torch.complex64"),
    "an axis": (lambda x: fzero.pmax(x, "seq"), AxisError, "pmax: axis='seq', and the axis here"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        simulated(call, torch.ones(2, 2, 3))


UNLIKE: dict[str, tuple[Callable[[int, Tensor], Any], str, str]] = {
    "shapes": (
        lambda last, x: fzero.all_to_all(x[:, : 3 - last]),
        "all_to_all of dim 0 along dim 0[(2, 1, 3) float32]",
        "all_to_all of dim 0 along dim 0[(2, 1, 2) float32]",
    ),
    "dims": (
        lambda last, x: fzero.all_to_all(x, concat_dim=last),
        "all_to_all of dim 0 along dim 0[(2, 1, 3) float32]",
        "all_to_all of dim 0 along dim 1[(2, 1, 3) float32]",
    ),
    "widths": (
        lambda last, x: fzero.all_to_all(x[:, : 3 - last], sizes=[1, 1]),
        "all_to_all with sizes, along dim 0[(*, 3) float32]",
        "all_to_all with sizes, along dim 0[(*, 2) float32]",
    ),
    "pairs": (
        lambda last, x: fzero.ppermute(x, [(last, 1 - last)]),
        "ppermute by [(0, 1)][(2, 3) float32]",
        "ppermute by [(1, 0)][(2, 3) float32]",
    ),
    "an extremum": (
        lambda last, x: fzero.pmax(x) if last else fzero.pmin(x),
        "pmin[(2, 3) float32]",
        "pmax[(2, 3) float32]",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_virtual_ranks_that_differ_are_named_with_both_shapes(name: str) -> None:
    call, first, other = UNLIKE[name]
    with pytest.raises(MismatchError) as raised:
        fzero.simulate(lambda x: call(fzero.axis_index(), x), world_size=2)(torch.ones(2, 2, 3))
    assert f"rank 0: {first}; rank 1: {other}." in str(raised.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, axis: fzero.all_gather(x, axis),
        lambda x, axis: fzero.psum(x, axis),
        lambda x, axis: fzero.psum_scatter(x, axis),
        lambda x, axis: fzero.all_to_all(x, axis=axis),
        lambda x, axis: fzero.ppermute(x, [(0, 1), (1, 0)], axis=axis),
    ],
)
def test_virtual_ranks_of_each_part_may_give_other_shapes_also_none(call: Any) -> None:
    """As processes: ranks along an axis give equal shapes, and those of another line others."""
    sizes = {"data": 3, "seq": 2}

    def of_line(line: int, x: Tensor) -> Tensor:
        return call(x[: 2 * line], fzero.Mesh(sizes).axis.along("seq"))

    def body(x: Tensor) -> Any:
        line = fzero.Mesh(sizes).axis.along("data").rank
        pulled: Any = torch.func.vjp(lambda x: of_line(line, x), x)
        y, back = pulled
        return F.pad(y, (0, 8 - len(y))), back(torch.ones_like(y))[0]

    def alone(x: Tensor) -> Any:
        pulled: Any = torch.func.vjp(lambda x: call(x, None), x)
        return pulled[0], pulled[1](torch.ones_like(pulled[0]))[0]

    x = torch.arange(24.0).view(6, 4)
    ys, dxs = fzero.simulate(body, world_size=6)(x)
    for line in range(3):
        two = slice(2 * line, 2 * line + 2)
        y, dx = fzero.simulate(alone, world_size=2)(x[two, : 2 * line])
        same(ys[two], F.pad(y, (0, 8 - y.shape[1])))
        same(dxs[two], F.pad(dx, (0, 4 - 2 * line)))


def test_virtual_ranks_of_one_part_that_differ_are_named() -> None:
    def body(x: Tensor) -> Tensor:
        axis = fzero.Mesh({"data": 2, "seq": 2}).axis
        return fzero.psum(x[: 1 + axis.rank // 3], axis.along("seq"))

    message = r"rank 2: all_reduce\[\(1,\) float32\] over 'seq'; rank 3: all_reduce\[\(2,\)"
    with pytest.raises(MismatchError, match=message):
        fzero.simulate(body, world_size=4)(torch.ones(4, 2))


# The same in processes.


def unlike(rank: int, world_size: int) -> list[str]:
    found = []
    for call, _, _ in UNLIKE.values():
        try:
            call(rank, torch.ones(2, 3))
            found.append("nothing was raised")
        except MismatchError as error:
            found.append(str(error))
    same(fzero.psum(torch.ones(1)), torch.tensor([2.0]))  # in step
    return found


@pytest.mark.smoke
@on_gloo
def test_processes_that_differ_are_named_with_both_shapes() -> None:
    for found in run_ranks(unlike, 2):
        for message, (_, first, other) in zip(found, UNLIKE.values(), strict=True):
            assert f"rank 0: {first}" in message and f"rank 1: {other}" in message, message


def wrong(rank: int, world_size: int) -> list[str]:
    found = []
    for call, _, _ in WRONG.values():
        try:
            call(torch.ones(2, 3))
            found.append("")
        except FzeroError as error:
            found.append(str(error))
    same(fzero.psum(torch.ones(1)), torch.tensor([2.0]))
    return found


@on_gloo
def test_processes_refuse_the_same() -> None:
    first, second = run_ranks(wrong, 2)
    assert first == second and all(first)


COUNTS = [[2, 0, 3], [0, 0, 0], [1, 0, 4]]  # rank 1 has nothing, and gets nothing
ONE = [[0, 3, 0], [0, 1, 0], [0, 2, 0]]  # rank 1 gets everything


def by_every_way(xs: Tensor, vs: Tensor, rank: int) -> list[Any]:
    """Values, gradients and Hessian-vector products of one rank, of all that moves rows."""
    world = fzero.axis_size()
    found: list[Any] = []
    x, v = xs[rank], vs[rank]

    def uneven(counts: list[list[int]]) -> Callable[[Tensor], Tensor]:
        return lambda x: loss_by_sizes(x, counts)

    def permuted(x: Tensor) -> Tensor:
        return (fzero.ppermute(x, [(0, 1), (1, world - 1)]) ** 3 * (rank + 1)).sum()

    def exchanged(x: Tensor) -> Tensor:
        y = fzero.all_to_all(x[: 2 * world].T, split_dim=1, concat_dim=0)
        return (y**3 * (rank + 1)).sum()

    for loss in (uneven(COUNTS), uneven(ONE), permuted, exchanged):
        gradient = torch.func.grad(loss)
        found += [loss(x), gradient(x), torch.func.jvp(gradient, (x,), (v,))[1]]
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
        found.append(torch.autograd.grad((g * v).sum(), x)[0])
        x = x.detach()
    y = x + rank
    y[0, 0] = float("nan") if rank == 1 else 0
    found += [fzero.pmax(y), fzero.pmin(y), fzero.pmax(y.bfloat16()), fzero.pmin(rank)]
    found.append(fzero.ppermute(x.bfloat16()[0, 0], [(2, 0)]))
    return found


def in_process(rank: int, world_size: int, xs: Tensor, vs: Tensor) -> list[Any]:
    with fzero.count_collectives() as log:
        found = by_every_way(xs, vs, rank)
    rest = {op: n for op, n in log.counts(rank).items() if op != "agree"}
    return [*found, rest, log.wire_bytes(rank, ops=("ppermute", "all_to_all", "pmax", "pmin"))]


@on_gloo
def test_processes_give_what_virtual_ranks_give() -> None:
    xs, vs = integers((3, 8, 2), 1, bound=2), integers((3, 8, 2), 2, bound=2)
    virtual: dict[int, list[Any]] = {}

    def on_rank() -> None:
        rank = fzero.axis_index()
        virtual[rank] = by_every_way(xs, vs, rank)

    with fzero.count_collectives() as log:
        fzero.simulate(on_rank, world_size=3)()
    for rank, got in enumerate(run_ranks(in_process, 3, xs, vs)):
        *values, counts, sent = got
        for mine, want in zip(values, virtual[rank], strict=True):
            assert torch.equal(mine.nan_to_num(9e9), want.nan_to_num(9e9))
        assert counts == {op: n for op, n in log.counts(rank).items() if op != "agree"}
        assert sent == log.wire_bytes(rank, ops=tuple(counts))


def traced(rank: int, world_size: int, x: Tensor) -> list[Any]:
    sizes = [0, len(x)]

    def moves(x: Tensor) -> Tensor:
        y = fzero.ppermute(x, [(0, 1)]) + fzero.all_to_all(x)
        y = y + fzero.pmax(x.detach()) - fzero.pmin(x.detach())
        z, received = fzero.all_to_all(x, sizes=sizes)
        return (y**2).sum() + (fzero.all_to_all(z, sizes=received)[0] ** 3).sum()

    gradient = torch.func.grad(moves)
    graph = make_fx(gradient)(torch.zeros_like(x))
    by_data = torch.func.grad(lambda x, s: fzero.all_to_all(x, sizes=s)[0].sum())
    with pytest.raises(PhaseError, match="sizes that are a tensor of a trace"):
        make_fx(by_data, tracing_mode="fake")(x, torch.tensor(sizes))
    return [graph(x), gradient(x), sorted({*collectives_in(graph)})]


@on_gloo
def test_all_of_them_can_be_traced() -> None:
    for graph, eager, names in run_ranks(traced, 2, integers((2, 3), 1)):
        same(graph, eager)
        assert names == ["all_to_all", "pmax", "pmin", "ppermute", "uneven_all_to_all"]


def in_compiled(x: Tensor) -> Tensor:
    """All collectives in one function, with ops before, between and behind them."""
    world = fzero.axis_size()
    ring = [(r, (r + 1) % world) for r in range(world)]
    y = fzero.ppermute(x * 2, ring).sin() + fzero.all_to_all(x.cos())
    z, received = fzero.all_to_all(y * x, sizes=[0] * (world - 1) + [len(x)])
    back, _ = fzero.all_to_all(z * 3, sizes=received)
    y = fzero.psum(back) + fzero.pmean(y) - fzero.pmax(x.detach())
    return fzero.psum_scatter(fzero.all_gather(y)).square().sum() * fzero.axis_index()


def compiled(rank: int, world_size: int, x: Tensor) -> list[Any]:
    found = []
    for fn in (in_compiled, torch.compile(in_compiled, backend="eager")):
        x = x.detach().clone().requires_grad_()
        with warnings.catch_warnings():  # dynamo looks at .grad of what it goes on with
            warnings.filterwarnings(
                "ignore", r"The \.grad attribute of a Tensor that is not a leaf"
            )
            y = fn(x)
        y.backward()
        found.append((y.detach(), x.grad))
    return found


@on_gloo
def test_under_the_users_compile_they_run_between_graphs() -> None:
    for eager, graphs in run_ranks(compiled, 2, torch.linspace(-1, 1, 12).view(4, 3)):
        same(graphs, eager)
