"""Hooks and early ends of forward passes."""

from __future__ import annotations

import pytest
import torch

from tl_layersim.sources.hooks import ForwardRun, on_enter, on_leave, temporary_hooks


def test_a_stop_ends_its_own_run_and_no_other():
    module, reached = torch.nn.Linear(2, 2), []
    with ForwardRun() as outer:
        with temporary_hooks() as handles, ForwardRun():
            handles.append(on_leave(module, lambda *_: outer.stop()))
            module(torch.ones(1, 2))
        reached.append("after the inner run")
    assert reached == []
    assert not module._forward_hooks


def test_a_run_can_be_used_again():
    run, module = ForwardRun(), torch.nn.Linear(2, 2)
    with temporary_hooks() as handles:
        handles.append(on_enter(module, lambda *_: run.stop()))
        for _ in range(2):
            with run:
                pytest.fail(f"the forward pass gave {module(torch.ones(1, 2))}")


def test_other_errors_pass_through_and_hooks_are_removed():
    module = torch.nn.Linear(2, 2)

    def run():
        with temporary_hooks() as handles, ForwardRun():
            handles += [on_enter(module, lambda *_: None), on_leave(module, lambda *_: None, always=True)]
            module(torch.ones(1, 3))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_hooks_take_the_arguments_in_order():
    class Block(torch.nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale

    module, calls = Block(), []
    with temporary_hooks() as handles:
        handles.append(on_enter(module, lambda *given: calls.append(("second", given[1:]))))
        handles.append(on_enter(module, lambda *given: calls.append(("first", given[1:])), first=True))
        handles.append(on_leave(module, lambda *given: calls.append(("plain", given[1:]))))
        handles.append(on_leave(module, lambda *given: calls.append(("named", given[1:])), with_kwargs=True))
        module(1.0, scale=2.0)
    before = ((1.0,), {"scale": 2.0})
    assert calls == [("first", before), ("second", before), ("plain", ((1.0,), 2.0)), ("named", (*before, 2.0))]
