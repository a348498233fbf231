"""Hypothesis strategies: programs, and the worlds that they run in."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.behaviours.programs import Op, Program, Setting

LOSSES = 3
MAX_UPDATES = 6  # each adds binary digits to the parameters; fp64 has 53

_NUMBERS = st.integers(0, LOSSES - 1)
_GRAD = _NUMBERS.map(lambda k: ("grad", k))
_UPDATE, _READ = st.just(("update",)), st.sampled_from([("read",), ("params",)])
_FAILING = st.one_of(st.just(("raise",)), _NUMBERS.map(lambda k: ("raise in loss", k)))


def _ops(*, depth: int, fails: bool, updates: bool = True) -> st.SearchStrategy[tuple[Op, ...]]:
    op = st.one_of(_GRAD, _GRAD, _UPDATE if updates else _GRAD, _READ)
    op = st.one_of(op, op, _FAILING) if fails else op
    if depth:
        inner = _ops(depth=depth - 1, fails=fails, updates=updates)
        parts = _ops(depth=depth - 1, fails=fails, updates=False)  # of a batch: one update, last
        op = st.one_of(
            op,
            op,
            inner.map(lambda ops: ("window", ops)),
            inner.map(lambda ops: ("clip", ops)),
            st.builds(
                _accumulate, st.sampled_from([1, 2]), parts, st.sampled_from([False, updates])
            ),
        )
    return st.lists(op, max_size=4).map(tuple)


def _accumulate(steps: int, ops: tuple[Op, ...], updates: bool) -> Op:
    return ("accumulate", steps, (*ops, ("update",)) if updates else ops)


def programs(*, fails: bool = True) -> st.SearchStrategy[Program]:
    """Up to five steps with up to two levels of nesting and at most `MAX_UPDATES` updates."""
    steps = st.lists(_ops(depth=2, fails=fails), min_size=1, max_size=5).map(tuple)
    return steps.filter(lambda program: str(program).count("'update'") <= MAX_UPDATES)


def settings_of(ranks: int | None = None) -> st.SearchStrategy[Setting]:
    """Worlds over which nothing may change."""
    return st.builds(
        Setting,
        ranks=st.sampled_from([1, 2, 3, 4]) if ranks is None else st.just(ranks),
        stage=st.integers(0, 3),
        reshard=st.sampled_from([True, False, "window"]),
        bucket_bytes=st.sampled_from([1, 100, 2**20]),
        donate=st.booleans(),
        ordered=st.booleans(),
        replicas=st.integers(1, 4),
        over=st.sampled_from(["shard", "all"]),
    )
