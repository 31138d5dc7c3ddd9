"""Inputs that share memory with an input that is written (pytorch issue 139789)."""

from __future__ import annotations

import logging

import pytest
import torch

import kagent_core


def write_then_multiply(x, y):
    x.add_(1)
    return x * y


SEPARATE = lambda: (torch.randn(8), torch.randn(8))


def shifted():
    base = torch.randn(10)
    return base[1:9], base[:8]


def same():
    base = torch.randn(8)
    return base, base[:]


def halves():
    base = torch.randn(16)
    return base[:8], base[8:]


def interleaved():
    base = torch.randn(16)
    return base[::2], base[1::2]


LAYOUTS = {"separate": SEPARATE, "shifted": shifted, "same": same, "halves": halves, "interleaved": interleaved}


def check(compiled, function, layout):
    torch.manual_seed(1)
    mine = LAYOUTS[layout]()
    torch.manual_seed(1)
    theirs = LAYOUTS[layout]()
    with torch.no_grad():
        got, want = compiled(*mine), function(*theirs)
    torch.testing.assert_close(got, want, msg=lambda text: f"{layout}: {text}")
    torch.testing.assert_close(mine, theirs, msg=lambda text: f"{layout}, arguments: {text}")


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_order_of_layouts(first, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, y: write_then_multiply(x, y), backend="kagent", options={"device": "cpu"}, dynamic=dynamic
    )
    check(compiled, write_then_multiply, first)
    for layout in LAYOUTS:
        check(compiled, write_then_multiply, layout)
    check(compiled, write_then_multiply, first)


def test_a_call_that_leaves_the_plan_says_so(caplog):
    compiled = torch.compile(lambda x, y: write_then_multiply(x, y), backend="kagent", options={"device": "cpu"})
    check(compiled, write_then_multiply, "separate")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="kagent"):
        check(compiled, write_then_multiply, "separate")
        assert not caplog.records
        check(compiled, write_then_multiply, "shifted")
    assert "runs in eager PyTorch" in caplog.text
    assert "shares memory with" in caplog.text


def test_a_larger_tensor_at_the_same_address_is_seen():
    """Addresses alone do not tell with symbolic sizes: the ranges must be looked at again."""
    compiled = torch.compile(
        lambda x, y: write_then_multiply(x, y[: x.shape[0]]), backend="kagent", options={"device": "cpu"}, dynamic=True
    )
    for size in (4, 4, 12):
        base = torch.randn(32)
        twin = base.clone()
        with torch.no_grad():
            got = compiled(base[:size], base[8 : 8 + size])
            want = write_then_multiply(twin[:size], twin[8 : 8 + size])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(base, twin)


def test_training_with_overlapping_inputs():
    w = torch.randn(8, requires_grad=True)
    v = w.detach().clone().requires_grad_()

    def function(x, y, w):
        x.add_(1)
        return (x * y * w).sum()

    compiled = torch.compile(lambda *a: function(*a), backend="kagent", options={"device": "cpu"})
    compiled(torch.randn(8), torch.randn(8), w)
    base = torch.randn(10)
    twin = base.clone()
    (got,) = torch.autograd.grad(compiled(base[1:9], base[:8], w), w)
    (want,) = torch.autograd.grad(function(twin[1:9], twin[:8], v), v)
    torch.testing.assert_close(got, want)


def test_run_op_with_one_tensor_twice():
    x = torch.arange(8.0)
    kagent_core.run_op("aten::mul_.Tensor", x, x, device="cpu")
    torch.testing.assert_close(x, torch.arange(8.0) ** 2)


def test_run_op_refuses_what_eager_refuses():
    base = torch.arange(8.0)
    with pytest.raises(RuntimeError, match="single memory location"):
        base[1:].add_(base[:7])
    with pytest.raises(RuntimeError, match="single memory location"):
        kagent_core.run_op("aten::add_.Tensor", base[1:], base[:7], device="cpu")
    assert torch.equal(base, torch.arange(8.0))


@pytest.mark.parametrize("rows", [6, 10])
def test_views_without_a_base_that_overlap(rows):
    """Under inference mode, a view does not know what it is a view of, nor how much of that is behind it."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: write_then_multiply(x, y), backend="kagent", options={"device": "cpu"})
    with torch.inference_mode():
        for _ in range(2):
            base = torch.randn(rows, 8)
            twin = base.clone()
            torch.testing.assert_close(compiled(base[:5], base[1:6]), write_then_multiply(twin[:5], twin[1:6]))
            torch.testing.assert_close(base, twin)
