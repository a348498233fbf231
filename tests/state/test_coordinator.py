"""The coordinator's transitions, one by one. Random programs are in test_coordinator_machine."""

from __future__ import annotations

import pytest

from fzero.state.coordinator import (
    abort,
    begin_step,
    end_step,
    fetch,
    gathered,
    hold,
    let_go,
    register_external,
    release,
    require_ready,
    updated,
)
from fzero.state.coordinator_effects import Agree, Drain, Gather, Prefetch, Release, Wait, Warn
from fzero.state.residency import Status
from fzero.state.trace import Complete, Invalid, Recording
from tests.state.coordinator_example import (
    BLOCK,
    ROOT,
    TIED,
    A,
    B,
    C,
    D,
    calls,
    made,
    of,
    play,
    trained,
)


def test_a_module_is_gathered_awaited_used_and_released() -> None:
    s, effects = fetch(made(), TIED)
    assert effects == (Gather((0, 3)), Wait((0, 3)))
    assert (s.in_flight, s.available, s.active) == ((0, 3), (), (TIED,))
    s, _ = gathered(s, [3])
    s, _ = gathered(s, [0])
    assert (s.in_flight, s.available) == ((), (0, 3))
    assert require_ready(s, TIED) is s
    s, effects = release(s, TIED)
    assert effects == (Release((0, 3)),)
    assert s == made()


def test_what_is_live_is_not_gathered_again() -> None:
    s, _ = fetch(made(), A)
    s, effects = fetch(s, TIED)  # unit 0 is in flight for A
    assert effects == (Gather((3,)), Wait((0, 3)))
    s, _ = gathered(s, (0, 3))
    assert fetch(s, TIED)[1] == ()


def test_what_another_module_uses_is_not_released() -> None:
    s, effects = play(made(), (fetch, TIED), (fetch, A), (release, A))
    assert of(Release, effects) == []
    assert release(s, TIED)[1] == (Release((0, 3)),)


def test_a_module_called_several_times_is_released_with_its_last_use() -> None:
    s, effects = play(made(), (fetch, A), (fetch, A), (fetch, A), (release, A), (release, A))
    assert effects == [Gather((0,)), Wait((0,))]
    assert s.active == (A,)
    assert release(s, A)[1] == (Release((0,)),)


def test_a_module_without_parameters_has_no_effects_and_no_place_in_the_order() -> None:
    s, effects = play(made(), (begin_step,), (fetch, ROOT), *calls(A), (release, ROOT))
    assert effects == [Gather((0,)), Wait((0,)), Release((0,))]
    s, effects = play(s, (begin_step,))
    assert effects == [Agree(("0: a uses u0 (1)",))]
    s, effects = play(s, (fetch, ROOT), (release, ROOT), *calls(A))
    assert not of(Warn, effects)


def test_the_trace_is_recorded_in_the_first_step_and_complete_from_the_second() -> None:
    s = made(prefetch_bucket_numel=100)
    assert isinstance(s.trace, Invalid)
    s, effects = play(s, (begin_step,), *calls(A, B, A))
    assert isinstance(s.trace, Recording)
    assert of(Prefetch, effects) == []
    s, effects = play(s, (end_step,), (begin_step,))
    assert effects == [Agree(("0: a uses u0 (1)", "1: b uses u1 (2)", "2: a uses u0 (1)"))]
    order = s.trace.order
    s, effects = play(s, *calls(A, B, A), (end_step,), (begin_step,))
    assert s.trace == Complete(order=order)
    assert s.trace.order is order
    assert not any(isinstance(effect, Agree | Warn) for effect in effects)


def test_a_step_in_which_nothing_ran_is_no_order() -> None:
    s, effects = play(made(), (begin_step,), (begin_step,), (begin_step,))
    assert (s.trace, effects) == (Recording(), [])


@pytest.mark.parametrize(
    ("bucket", "max_live", "ahead"),
    [
        (0, 99, ()),
        (1, 99, ()),  # unit 1 does not fit, and nothing overtakes it
        (2, 99, (1,)),
        (5, 99, (1,)),
        (6, 99, (1, 2)),
        (13, 99, (1, 2)),
        (14, 99, (1, 2, 3)),
        (99, 99, (1, 2, 3)),
        (99, 15, (1, 2, 3)),
        (99, 14, (1, 2)),
        (99, 2, ()),
        (99, 0, ()),
    ],
)
def test_prefetch_goes_as_far_as_the_bucket_and_the_live_limit(
    bucket: int, max_live: int, ahead: tuple[int, ...]
) -> None:
    s = made(prefetch_bucket_numel=bucket, max_live_parameters_numel=max_live)
    _, effects = fetch(trained(s, A, B, C, D, C), A)
    assert effects == (Gather((0,)), Wait((0,)), *([Prefetch(ahead)] if ahead else []))


def test_the_bucket_has_room_again_when_what_was_ahead_is_reached() -> None:
    s = trained(made(prefetch_bucket_numel=6), A, B, C, D, BLOCK)
    s, effects = play(s, *calls(A))
    assert of(Prefetch, effects) == [(1, 2)]
    s, effects = play(s, *calls(B))
    assert effects == [Wait((1,)), Release((1,))]  # unit 3 is larger than the bucket
    s, effects = play(s, *calls(C, D))
    assert effects == [Wait((2,)), Release((2,)), Gather((3,)), Wait((3,)), Release((3,))]


@pytest.mark.parametrize(
    ("reach", "released"),
    [(0, {0, 1, 2}), (1, {0, 1}), (8, {0, 1}), (9, {0}), (20, {0}), (21, set())],
)
def test_what_is_used_again_soon_is_kept(reach: int, released: set[int]) -> None:
    s = trained(made(max_reuse_distance_numel=reach), A, B, C, C, B, D, A)
    _, effects = play(s, *calls(A, B, C))
    # Up to the next use of unit 0: 2 + 4 + 4 + 2 + 8 elements; of unit 1: 4 + 4; of unit 2: none.
    assert {unit for ids in of(Release, effects) for unit in ids} == released


@pytest.mark.parametrize(
    ("max_live", "released"), [(7, []), (6, [(0,)]), (4, [(0, 1)]), (3, [(0, 1), (2,)])]
)
def test_of_what_is_kept_the_farthest_leaves_first_when_it_is_too_much(
    max_live: int, released: list[tuple[int, ...]]
) -> None:
    s = made(max_reuse_distance_numel=99, max_live_parameters_numel=max_live)
    _, effects = play(trained(s, A, B, C, C, B, A), *calls(A, B, C))
    assert of(Release, effects) == released


def test_room_is_made_before_a_gather_also_of_what_is_in_flight() -> None:
    limits = {"prefetch_bucket_numel": 8, "max_reuse_distance_numel": 99}
    s = trained(made(max_live_parameters_numel=11, **limits), A, D, A)
    s, effects = play(s, *calls(A))
    assert (of(Prefetch, effects), s.in_flight) == ([(3,)], (3,))
    s, effects = fetch(s, BLOCK)
    assert isinstance(effects[0], Warn)
    assert effects[1:] == (Drain((3,)), Release((0,)), Gather((4,)), Wait((4,)))
    assert s.residency.live_numel == 16


@pytest.mark.parametrize("events", [[B], [A, A], [A, B, C, C]])
def test_another_order_invalidates_once_and_records_again(events: list[int]) -> None:
    s = trained(made(prefetch_bucket_numel=99), A, B, C, D)
    s, effects = play(s, *calls(*events), *calls(D, A, B), (end_step,))
    (warning,) = [effect for effect in effects if isinstance(effect, Warn)]
    assert "the order in which modules use their parameters has changed" in warning.message
    assert "Fix: " in warning.message
    assert isinstance(s.trace, Invalid)
    s, effects = play(s, (begin_step,), *calls(D, A), (end_step,))
    assert not of(Prefetch, effects)
    s, effects = play(s, (begin_step,), *calls(D, A), (end_step,))
    assert of(Prefetch, effects) == [(0,)]
    assert not any(isinstance(effect, Warn) for effect in effects)


def test_the_warning_names_what_came_and_what_was_expected() -> None:
    _, effects = fetch(trained(made(), A, B), B)
    assert "'b' came at place 0, where the order has 'a'" in effects[0].message


def test_a_step_that_goes_on_after_the_end_of_its_order_is_recorded_and_warns_of_nothing() -> None:
    s = trained(made(prefetch_bucket_numel=99), A, B)
    s, effects = play(s, *calls(A, B, C, A), (end_step,), (begin_step,))
    s, more = play(s, *calls(A, B), (end_step,), (begin_step,), *calls(A, B, C, A))
    assert not any(isinstance(effect, Warn) for effect in (*effects, *more))
    assert isinstance(s.trace, Complete) and s.trace.order.modules == (A, B, C, A)


def test_a_step_that_ends_early_leaves_the_order_valid() -> None:
    s = trained(made(prefetch_bucket_numel=2), A, B, B, A)
    s, effects = play(s, *calls(A), (end_step,), (begin_step,), *calls(A, B, B, A))
    assert of(Prefetch, effects) == [(1,), (1,), (0,)]
    assert of(Drain, effects) == [(1,)]
    assert not any(isinstance(effect, Warn) for effect in effects)


def test_small_parameters_persist_from_the_first_step() -> None:
    s, effects = begin_step(made(persistence_threshold_numel=2))
    assert effects == (Gather((0, 1)),)
    s, effects = play(s, *calls(A, B, A, C), (end_step,), (begin_step,), *calls(A, B))
    assert of(Gather, effects) == [(2,)]
    assert of(Release, effects) == [(2,)]
    assert s.available == (0, 1)


def test_what_persists_has_no_place_in_the_order() -> None:
    s = trained(made(persistence_threshold_numel=2), A, C, B)
    _, effects = play(s, *calls(B, B, C, A), (end_step,), (begin_step,))
    assert not any(isinstance(effect, Warn) for effect in effects)


def test_what_persists_is_gathered_again_at_once_after_an_update() -> None:
    s, _ = play(made(persistence_threshold_numel=2), (begin_step,), *calls(A), (end_step,))
    s, effects = updated(s, (1, 0, 2))
    assert effects == (Drain((1,)), Release((0,)))
    assert begin_step(s)[1] == (Agree(()), Gather((0, 1)))


def test_a_foreign_unit_belongs_to_its_user_from_then_on() -> None:
    s, effects = play(made(), (begin_step,), (fetch, ROOT), (register_external, ROOT, (1, 2)))
    assert effects == [Gather((1, 2)), Wait((1, 2))]
    s, effects = play(s, (register_external, ROOT, (2, 1)), (release, ROOT), *calls(ROOT))
    assert effects == [Release((1, 2)), Gather((1, 2)), Wait((1, 2)), Release((1, 2))]
    s, effects = play(s, (end_step,), (begin_step,), *calls(ROOT, ROOT))
    assert effects[0] == Agree(("0: (root) uses u1 (2), u2 (4)", "1: (root) uses u1 (2), u2 (4)"))
    assert not any(isinstance(effect, Warn) for effect in effects)


def test_a_foreign_unit_found_late_invalidates_the_order_once() -> None:
    s, effects = register_external(trained(made(), A, B), A, (2,))
    (warning,) = effects
    assert "'a' began to use 2 ('u2')" in warning.message
    assert register_external(s, A, (2,)) == (s, ())
    assert fetch(s, A)[1] == (Gather((0, 2)), Wait((0, 2)))


def test_the_end_of_a_step_ends_every_use_and_frees_all_but_what_persists() -> None:
    s = trained(made(prefetch_bucket_numel=2, persistence_threshold_numel=1), C, B)
    s, effects = play(s, (fetch, C), (fetch, A), (end_step,))
    assert effects[-2:] == [Drain((1,)), Release((2,))]
    assert (s.active, s.available, s.in_flight) == ((), (0,), ())


def test_an_exception_leaves_a_clean_state_and_the_next_step_is_right() -> None:
    s, _ = begin_step(made(persistence_threshold_numel=1))
    s, _ = play(s, (fetch, TIED))
    s, _ = fetch(s, B)
    s, effects = abort(s)
    assert effects == (Drain((1,)), Release((0, 3)))
    assert (s.active, s.available, s.trace) == ((), (), Invalid())
    s, effects = play(s, (begin_step,), *calls(B), (end_step,), (begin_step,))
    use = [Gather((1,)), Wait((1,)), Release((1,))]
    assert effects == [Gather((0,)), *use, Agree(("0: b uses u1 (2)",))]


def test_an_exception_drains_what_persists_and_keeps_a_complete_order() -> None:
    s = made(persistence_threshold_numel=1)
    s, effects = play(s, (begin_step,), (abort,), (begin_step,), *calls(B), (end_step,))
    assert effects[:3] == [Gather((0,)), Drain((0,)), Gather((0,))]
    s, _ = play(s, (begin_step,), (fetch, B), (abort,))
    s, effects = play(s, (begin_step,), *calls(B))
    assert isinstance(s.trace, Complete)
    assert not any(isinstance(effect, Warn) for effect in effects)


def test_what_is_held_stays_through_steps_and_exceptions() -> None:
    s, effects = play(made(), (hold, (0, 1)), (hold, (0,)))
    assert effects == [Gather((0, 1)), Wait((0, 1))]
    s, effects = play(s, (begin_step,), *calls(A, B, C), (end_step,), (fetch, C), (abort,))
    assert of(Release, effects) == [(2,), (2,)]
    s, effects = play(s, (let_go, (0, 1)), (let_go, (0,)))
    assert effects == [Release((1,)), Release((0,))]
    assert s.residency == made().residency


def test_a_state_shows_itself_in_a_line() -> None:
    s, _ = play(trained(made(), A, B), (fetch, A))
    assert repr(s) == (
        "CoordinatorState(place 1 of 2, 1 of 31 elements live, available: 0 ('u0'), "
        "in flight: none, in use: 'a')"
    )
    assert s.residency.status(0) is Status.AVAILABLE
