"""Plans are kept by what a program depends on: shapes, strides, integers; in a bounded cache."""

from __future__ import annotations

import pytest
import torch

from kagent_core.errors import CaptureError

from .traced import CPU, compiled, same, session, traced


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many graphs Dynamo has captured."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Plans:
    """The plans that were built since this was made."""

    def __init__(self, **options):
        self.reports = session(**options).reports
        self.reports.clear()

    def __len__(self):
        return len(self.reports)


def rows_of(graph):
    return [plan.program.inputs[0].shape[0] for plan in graph.plans()]


# -- the cache


def test_the_least_recently_used_plan_is_dropped():
    graph = traced(lambda x: (x * 2.0,), torch.randn(3, 4), symbolic=True, **CPU, plan_cache_size=3)
    for rows in (3, 4, 5, 3, 6):  # 4 is the oldest when 6 comes
        x = torch.randn(rows, 4)
        same(graph([x])[0], x * 2.0)
    assert rows_of(graph) == [5, 3, 6]


def test_a_plan_is_built_once_while_it_is_kept():
    plans = Plans(**CPU, plan_cache_size=2)
    graph = traced(lambda x: (x * 2.0,), torch.randn(3, 4), symbolic=True, **CPU, plan_cache_size=2)
    for rows in (3, 3, 4, 3, 4, 4):
        graph([torch.randn(rows, 4)])
    assert len(plans) == 2
    graph([torch.randn(5, 4)])  # pushes 3 out
    graph([torch.randn(4, 4)])
    assert len(plans) == 3
    graph([torch.randn(3, 4)])
    assert len(plans) == 4
    assert rows_of(graph) == [4, 3]


def test_a_cache_of_one():
    graph = traced(lambda x: (x * 2.0,), torch.randn(3, 4), symbolic=True, **CPU, plan_cache_size=1)
    for rows in (3, 4, 3, 4):
        x = torch.randn(rows, 4)
        same(graph([x])[0], x * 2.0)
        assert rows_of(graph) == [rows]


def test_what_a_graph_was_not_captured_for_is_refused():
    graph = traced(lambda x: (x * 2.0,), torch.randn(3, 4), **CPU)
    for wrong in (torch.randn(3, 5), torch.randn(4, 3).t(), torch.randn(3, 4, dtype=torch.float64)):
        with pytest.raises(CaptureError, match="but the graph was captured for"):
            graph([wrong])
    x = torch.randn(3, 4)
    same(graph([x])[0], x * 2.0)


# -- one symbolic graph, a plan per concrete shape


def network(x, w):
    return torch.softmax(torch.relu(x @ w).reshape(x.shape[0], 2, -1).sum(1), dim=-1) + x.shape[0]


def test_a_new_shape_is_a_new_plan_and_no_new_capture():
    w = torch.randn(4, 6)
    plans = Plans(**CPU)
    run = compiled(network, dynamic=True, **CPU)
    shapes = [3, 5, 8, 64, 5, 3]
    for rows in shapes:
        x = torch.randn(rows, 4)
        same(run(x, w), network(x, w))
    assert graphs() == 1
    assert len(plans) == len(set(shapes))


def test_sizes_become_symbolic_by_themselves():
    w = torch.randn(4, 6)
    plans = Plans(**CPU)
    run = compiled(network, dynamic=None, **CPU)
    captured = []
    for rows in (3, 5, 8, 64, 17):
        x = torch.randn(rows, 4)
        same(run(x, w), network(x, w))
        captured.append(graphs())
    assert captured == [1, 2, 2, 2, 2]  # the second shape tells Dynamo that the size varies
    assert len(plans) == 5


def test_a_size_marked_dynamic():
    run = compiled(lambda x: (x * 2.0).sum(0), dynamic=None, **CPU)
    for rows in (4, 5, 6):
        x = torch.randn(rows, 3)
        torch._dynamo.mark_dynamic(x, 0)
        same(run(x), (x * 2.0).sum(0))
    assert graphs() == 1


@pytest.mark.parametrize("rows", [0, 1])
def test_sizes_that_dynamo_treats_apart(rows):
    run = compiled(lambda x: torch.cat([x * 2.0, x]), dynamic=True, **CPU)
    for size in (4, rows, 7):
        x = torch.randn(size, 3)
        same(run(x), torch.cat([x * 2.0, x]))


def test_symbolic_sizes_in_training():
    def loss(x, w):
        return network(x, w).square().sum()

    w = torch.randn(4, 6, requires_grad=True)
    run = compiled(loss, dynamic=True, **CPU)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4, requires_grad=True)
        expected = torch.autograd.grad(loss(x, w), (x, w))
        actual = torch.autograd.grad(run(x, w), (x, w))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert graphs() == 1


# -- integers


def test_integer_inputs():
    def function(x, n):
        return x[:n] * n + x.shape[0] // n, n + 1

    plans = Plans(**CPU)
    run = compiled(function, dynamic=True, **CPU)
    x = torch.randn(12, 3)
    for n in (2, 3, 7, 3, 2):
        (got, number), (expected, expected_number) = run(x, n), function(x, n)
        same(got, expected)
        assert (type(number), number) == (int, expected_number)
    assert graphs() == 1
    assert len(plans) == 3


def test_an_integer_that_changes_only_the_result():
    """The same shapes with another number: a plan that forgot the number would give the last one's result."""
    run = compiled(lambda x, n: x + n, dynamic=True, **CPU)
    x = torch.randn(5)
    for n in (2, 3, 2, 40):
        same(run(x, n), x + n)


def test_float_and_bool_inputs():
    run = compiled(lambda x, f, flag: x * f if flag else x - f, dynamic=True, **CPU)
    x = torch.randn(5)
    for f, flag in ((2.0, True), (2.5, True), (2.5, False), (-0.0, True), (float("nan"), False)):
        same(run(x, f, flag), x * f if flag else x - f)


VIEWS_OF_A_PRODUCT = {
    "unsqueeze": lambda y: y.unsqueeze(1) + 1,
    "permute": lambda y: y.t(),
    "view": lambda y: y.view(-1).exp(),
    "views of views": lambda y: y.t().unsqueeze(0)[:, 1:].sum(-1),
    "expand": lambda y: y.unsqueeze(0).expand(3, -1, -1).sum(0),
    "several": lambda y: torch.cat([part * i for i, part in enumerate(y.split(2, -1))]),
    "other numbers": lambda y: (y.view(torch.int32) & -2).view(torch.float32),
    "written": lambda y: (y[0].add_(1), y),
    "as_strided": lambda y: torch.as_strided(y, (2, 2), (1, 2), 1) + 1,
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("view", VIEWS_OF_A_PRODUCT)
def test_a_view_of_a_product_with_a_number_that_changes(view, trained, dynamic):
    """PyTorch puts a product with a tensor in the place of one with a number, of which what follows was a view."""
    function = lambda x, f: VIEWS_OF_A_PRODUCT[view](x.cos() * f)
    run = compiled(function, dynamic=dynamic, **CPU)
    for rows, f in ((4, 1.5), (4, 2.5), (6, 3.5)):
        x = torch.randn(rows, 6, requires_grad=trained)
        given, expected = (one(x, f) for one in (run, function))
        given, expected = (each if isinstance(each, tuple) else (each,) for each in (given, expected))
        for one, other in zip(given, expected, strict=True):
            same(one, other)
        if expected[-1].requires_grad:
            gradients = [torch.autograd.grad(each[-1].sum(), x)[0] for each in (given, expected)]
            torch.testing.assert_close(*gradients)  # AOTAutograd lays them out by the result


def positions(x, known):
    place = torch.arange(x.shape[0]) + known.shape[0]
    return (
        (x.sin() * 2 + place * 0.5).relu() * x.shape[0],
        place - known.shape[0],
        x / known.shape[0],
        place < x.shape[0],
        torch.add(place, place, alpha=known.shape[0]),
    )


def test_numbers_that_follow_from_sizes_are_not_compiled_again_and_again(tmp_path):
    run = compiled(positions, dynamic=True, **CPU, cache_dir=tmp_path)
    libraries = []
    for rows in (9, 10, 11, 13):
        x, known = torch.randn(7), torch.randn(rows)
        for one, other in zip(run(x, known), positions(x, known), strict=True):
            same(one, other)
        libraries.append(sorted(tmp_path.rglob("*.so")))
    assert libraries[0]
    assert libraries.count(libraries[0]) == len(libraries)


def test_numbers_that_follow_from_sizes_are_generated_by_request():
    run = compiled(positions, dynamic=True, generated_kernels="all", **CPU)
    for rows in (9, 10):
        x, known = torch.randn(7), torch.randn(rows)
        for one, other in zip(run(x, known), positions(x, known), strict=True):
            same(one, other)


# -- strides and offsets

LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "every other": lambda: torch.randn(4, 12)[:, ::2],
    "offset": lambda: torch.randn(30)[6:].view(4, 6),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
}


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_layout_of_an_input(dynamic):
    function = lambda x: (torch.relu(x).t() @ x, x * 2.0)
    run = compiled(function, dynamic=dynamic, **CPU)
    for _ in range(2):
        for name, make in LAYOUTS.items():
            x = make()
            for got, expected in zip(run(x), function(x), strict=True):
                assert got.stride() == expected.stride(), name
                torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_symbolic_strides_make_plans_of_one_graph():
    function = lambda x: (x * 2.0,)
    graph = traced(function, torch.randn(4, 10)[:, :6], symbolic=True, **CPU)
    for columns in (10, 14, 10):
        x = torch.randn(4, columns)[:, :6]
        same(graph([x])[0], x * 2.0)
    assert [plan.program.inputs[0].strides for plan in graph.plans()] == [(14, 1), (10, 1)]


def test_an_offset_makes_no_new_plan():
    plans = Plans(**CPU)
    run = compiled(lambda x: x * 2.0, **CPU)
    storage = torch.randn(40)
    for start in (0, 3, 8):
        x = storage[start : start + 24].view(4, 6)
        same(run(x), x * 2.0)
    assert graphs() == 1
    assert len(plans) == 1


def test_an_absolute_offset_makes_one():
    """as_strided counts from the start of the storage."""
    function = lambda x: x.as_strided((3,), (2,), 4) * 2.0
    run = compiled(function, **CPU)
    storage = torch.randn(40)
    for start in (0, 3, 8, 3):
        x = storage[start : start + 24]
        same(run(x), function(x))
