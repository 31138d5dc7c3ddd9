"""Faults of a device, one at a time: a typed error that names the operator, no leak, the next call right."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kagent_core
from kagent_core.capture.graph import CapturedGraph
from kagent_core.errors import ExecutionError, KagentError
from kagent_core.pipeline import CompiledGraph
from kagent_core.testing.fake import FakeDevice, FakeFaultError, FakeRuntime

METHODS = ("allocate", "copy_in", "copy_out", "load", "launch", "kernel", "synchronize", "event")
NTH = range(1, 27)


def program(x, w, v):
    """Two chains that join, an operator that falls back in the middle, an input that is written."""
    left = torch.ops.aten.relu(torch.ops.aten.mm(x, w))
    right = torch.ops.aten.mul.Tensor(torch.ops.aten.mm(x, v), 2)
    joined = torch.ops.aten.add.Tensor(left, right)
    middle = torch.ops.aten.add.Tensor(joined, torch.ops.aten.sin(right))
    torch.ops.aten.copy_(w, torch.ops.aten.add.Tensor(w, 1))
    return torch.ops.aten.mm(middle, v), torch.ops.aten.relu(right)


def arguments():
    torch.manual_seed(0)
    return [torch.randn(4, 4) for _ in range(3)]


@pytest.fixture(scope="module")
def graph_module():
    return make_fx(program, tracing_mode="fake")(*arguments())


def assert_right(compiled):
    mine, theirs = arguments(), arguments()
    for got, want in zip(compiled(mine), program(*theirs), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nth", NTH)
def test_fault(method, nth, graph_module):
    runtime = FakeRuntime(streams=2, delay_ms=0.05, seed=nth, faults={method: nth})
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        session = kagent_core.session_for(kagent_core.load_config(options={"device": "fake:0", "logs": "error"}))
        compiled = CompiledGraph(session, CapturedGraph(graph_module, "program"))
        error = None
        for _ in range(60):  # a plan loads and allocates once: more of that comes with more instances
            if method in ("allocate", "load"):
                for plan in compiled.plans():
                    plan.close()
                compiled = CompiledGraph(session, CapturedGraph(graph_module, "program"))
            try:
                assert_right(compiled)
            except KagentError as caught:
                error = caught
                break
        assert error is not None, f"call {nth} of {method} never came"
        assert isinstance(error, ExecutionError)
        assert "aten::" in str(error), f"the error names no operator: {error}"
        assert "injected fault" in str(error)
        assert isinstance(error.__cause__, FakeFaultError)
        for _ in range(2):
            assert_right(compiled)
        for plan in compiled.plans():
            plan.close()
        assert runtime.live == 0
        session.close()
