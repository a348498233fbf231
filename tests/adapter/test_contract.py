"""The names that code outside of this project is written against."""

from __future__ import annotations

import inspect

import fzero

ENGINE = """
    backward coalesce no_sync scale step state close zero_grad memory_report global_grad_norm
    full_gradients full_gradient full_parameters full_parameter
"""
HOOK_STATE = """
    remaining_grad_acc_hooks backward_active_depth backward_seen_this_step
    epilogue_ran_this_backward hooks_fired_this_backward max_expected_hooks_seen
    post_backward_callback_queued post_backward_callback_graph_task_id
"""


def test_the_adapter_and_the_records_are_reached_from_the_package() -> None:
    adapter = fzero.adapter
    engine = inspect.signature(adapter.Engine).parameters
    assert [*engine][:4] == ["module", "optimizer", "stage", "mesh"]
    assert engine["stage"].kind is inspect.Parameter.KEYWORD_ONLY
    initialize = inspect.signature(adapter.initialize).parameters
    assert [*initialize][:3] == ["model", "optimizer", "config"]
    assert {*ENGINE.split()} <= {*dir(adapter.Engine)}
    assert callable(adapter.sharded_init) and callable(adapter.gathered)


def test_the_hook_record_has_the_fields_of_the_field() -> None:
    assert {*HOOK_STATE.split()} <= {*dir(fzero.state.HookState())}
