"""A device of its own memory, through the whole pipeline: results, transfers, placement, training."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import kagent_core
from kagent_core import single
from kagent_core.errors import KernelNotFoundError
from kagent_core.schedule.placed import Transfer
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice

from .traced import FAKE, close, compiled, mlp, mlp_inputs, same, session, traced


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    plugin = FakeDevice(count=2)
    with kagent_core.use_plugin(plugin):
        yield plugin


def warnings_of(caplog, component="kagent.schedule"):
    return [r.getMessage() for r in caplog.records if r.name == component and r.levelno == logging.WARNING]


# -- results and transfers


def test_a_chain_runs_on_the_device_and_equals_eager(fake):
    inputs = mlp_inputs()
    run = compiled(mlp, **FAKE)
    for _ in range(3):
        same(run(*inputs), mlp(*inputs))
    assert fake.runtime.launches == ["fake__mm", "fake__relu", "fake__addmm", "fake__mul"] * 3
    (report,) = session(**FAKE).reports
    assert (report.tasks, report.fallbacks, report.transfers) == (4, (), 5)


def test_only_inputs_and_outputs_move(fake):
    inputs = mlp_inputs()
    compiled(mlp, **FAKE)(*inputs)
    assert fake.runtime.copied_in == sum(t.nbytes for t in inputs)
    assert fake.runtime.copied_out == 5 * 3 * 4


def test_an_input_with_many_readers_moves_once(fake):
    def function(x):
        return torch.relu(x), x + x, x * x

    x = torch.randn(7)
    same(compiled(function, **FAKE)(x), function(x))
    assert fake.runtime.copied_in == x.nbytes
    assert fake.runtime.copied_out == 3 * x.nbytes


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.view(6, 8),
        lambda t: t.view(6, 8).t(),
        lambda t: t.view(6, 8)[1:5, 2:7:2],
        lambda t: t[3:27].view(4, 6),
        lambda t: t[:4].view(4, 1).expand(4, 6),
    ],
)
def test_inputs_of_any_layout(fake, view):
    x = view(torch.randn(48))
    function = lambda x: torch.relu(x) * 2.0
    same(compiled(function, **FAKE)(x), function(x))
    assert len(fake.runtime.launches) == 2


def test_views_of_results_are_no_tasks(fake):
    def function(x):
        y = torch.relu(x)
        return y[1:], y.t(), y.view(-1)[2::3], y

    x = torch.randn(4, 6)
    run = compiled(function, **FAKE)
    for _ in range(2):
        got = run(x)
        same(got, function(x))
        assert len({t.untyped_storage().data_ptr() for t in got}) == 1, "they are views of one result"
    assert fake.runtime.launches == ["fake__relu"] * 2
    assert fake.runtime.copied_out == 2 * x.nbytes


def test_views_between_kernels(fake):
    function = lambda x, w: torch.relu((x @ w).t()[1:]) @ w
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    same(compiled(function, **FAKE)(x, w), function(x, w))
    assert fake.runtime.launches == ["fake__mm", "fake__relu", "fake__mm"]


def test_results_of_two_calls_share_no_memory(fake):
    run = compiled(lambda x: torch.relu(x), **FAKE)
    first = run(torch.ones(8))
    run(torch.zeros(8))
    same(first, torch.ones(8))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_dtypes(fake, dtype):
    x, y = (torch.randn(3, 5).mul(4).abs().to(dtype) for _ in range(2))
    same(compiled(torch.add, **FAKE)(x, y), x + y)
    assert fake.runtime.launches == ["fake__add"]


# -- inputs that are written


def test_a_written_input_gets_its_new_values(fake):
    def function(x, y):
        x.add_(y)
        return x * 2.0

    x, y = torch.randn(6), torch.randn(6)
    expected_x = x.clone()
    expected = function(expected_x, y)
    run = compiled(function, **FAKE)
    same(run(x, y), expected)
    same(x, expected_x)
    assert "fake__copy" in fake.runtime.launches
    same(run(x, y), function(expected_x, y))
    same(x, expected_x)


def test_between_a_strided_inputs_elements_nothing_is_touched(fake):
    def function(x):
        x.mul_(3.0)

    base = torch.arange(24.0)
    expected = base.clone()
    function(expected[1::2])
    compiled(function, **FAKE)(base[1::2])
    same(base, expected)
    assert "fake__copy" in fake.runtime.launches


def test_what_another_thread_could_write_between_the_elements_stays(fake):
    """The copy back is element by element: bytes that were copied in earlier must not come back over newer ones."""
    base = torch.arange(12.0)
    launch = fake.runtime.launch

    def launch_and_write(kernel, config, args):
        launch(kernel, config, args)
        base[0::2] = -1.0  # somebody else's elements

    fake.runtime.launch = launch_and_write
    compiled(lambda x: x.mul_(3.0), **FAKE)(base[1::2])
    same(base.view(6, 2), torch.stack([torch.full((6,), -1.0), 3.0 * torch.arange(1.0, 12.0, 2)], dim=1))


def test_a_buffer_is_written_and_read_by_turns_in_two_memories(fake):
    """Writes on the device, then a reader in host memory, then the device again."""

    def function(x, y):
        x.add_(y)
        z = torch.sin(x)  # the fake device has no sine
        x.mul_(z)
        return torch.relu(x) + z

    x, y = torch.randn(6), torch.randn(6)
    expected_x = x.clone()
    expected = function(expected_x, y)
    same(compiled(function, **FAKE)(x, y), expected)
    same(x, expected_x)


def test_an_input_returned_as_it_is(fake):
    def function(x, y):
        return x, torch.relu(y), x[1:]

    x, y = torch.randn(4), torch.randn(4)
    same_x, _, view = compiled(function, **FAKE)(x, y)
    assert same_x is x
    assert view.data_ptr() == x[1:].data_ptr()


# -- empty tensors


def test_nothing_is_launched_for_empty_tensors(fake):
    function = lambda x, y: (torch.relu(x) + x, torch.relu(y))
    inputs = torch.randn(0, 3), torch.randn(2)
    run = compiled(function, **FAKE)
    for _ in range(2):
        same(run(*inputs), function(*inputs))
    assert fake.runtime.launches == ["fake__relu"] * 2
    assert fake.runtime.copied_in == fake.runtime.copied_out == 16


def test_a_program_with_only_empty_tensors(fake):
    x = torch.randn(0, 3)
    same(compiled(lambda x: torch.relu(x) * 2.0, **FAKE)(x), x)
    assert fake.runtime.launches == []


# -- placement


def half_known(x):
    return torch.sin(torch.relu(x)) + torch.cos(x) * torch.sin(x)


def test_what_the_device_lacks_runs_on_the_fallback_device_and_one_line_says_so(fake, caplog):
    x = torch.randn(5)
    run = compiled(half_known, **FAKE)
    with caplog.at_level(logging.WARNING, "kagent"):
        for _ in range(3):
            same(run(x), half_known(x))
    (line,) = warnings_of(caplog)
    assert "3 of 6 calls do not run on fake:0" in line
    assert "2 on cpu (no kernel for aten::sin on 'fake:0')" in line
    assert "1 on cpu (no kernel for aten::cos on 'fake:0')" in line
    (report,) = session(**FAKE).reports
    assert sorted(fallback.signature for fallback in report.fallbacks) == ["aten::cos", "aten::sin", "aten::sin"]
    assert set(fake.runtime.launches) == {"fake__relu", "fake__mul", "fake__add"}


def test_no_line_when_all_runs_on_the_device(fake, caplog):
    with caplog.at_level(logging.WARNING, "kagent"):
        compiled(mlp, **FAKE)(*mlp_inputs())
    assert warnings_of(caplog) == []


def test_a_missing_kernel_is_an_error_where_config_says_so(fake):
    with pytest.raises(KernelNotFoundError) as caught:
        compiled(half_known, **FAKE, missing_kernel="error")(torch.randn(5))
    assert caught.value.message.startswith("no kernel for aten::")
    assert "on 'fake' takes what came: f32[5] strides (1,)" in caught.value.message
    assert 'set missing_kernel = "fallback"' in caught.value.hint
    assert fake.runtime.launches == []


def test_a_missing_overload_names_the_one_that_is_there(fake):
    strict = session(**FAKE, missing_kernel="error")
    with pytest.raises(KernelNotFoundError) as caught:
        single.run_overload(strict, torch.ops.aten.add.Scalar, (torch.randn(3), 1.0), {})
    assert "no kernel for aten::add.Scalar" in caught.value.message
    assert "the nearest registered signature is 'aten::add.Tensor'" in caught.value.hint


@pytest.mark.parametrize("policy", ["fallback", "error"])
def test_config_places_a_signature(fake, policy):
    options = {**FAKE, "placement": {"aten::relu": "cpu"}, "missing_kernel": policy}
    inputs = mlp_inputs()
    same(compiled(mlp, **options)(*inputs), mlp(*inputs))
    assert fake.runtime.launches == ["fake__mm", "fake__addmm", "fake__mul"]
    (report,) = session(**options).reports
    assert [(f.signature, f.device, f.reason) for f in report.fallbacks] == [
        ("aten::relu", "cpu", "config places aten::relu on cpu")
    ]


def test_from_device_to_device(fake):
    options = {**FAKE, "placement": {"aten::relu": "fake:1", "aten::addmm": "fake:1"}}
    graph = traced(lambda *a: (mlp(*a),), *mlp_inputs(), **options)
    inputs = mlp_inputs()
    same(graph(inputs), mlp(*inputs))
    (plan,) = graph.plans()
    assert [str(one.device) for one in plan.tasks] == ["fake:0", "fake:1", "fake:1", "fake:0"]
    moves = [step for step in plan.steps if isinstance(step, Transfer)]
    for one, other in ((0, 1), (1, 0)):  # each crossing goes through host memory
        assert any(m.to_device and m.device.index == other for m in moves)
        assert any(not m.to_device and m.device.index == one for m in moves)
    assert len([m for m in moves if not m.to_device]) == 3
    close(graph)
    assert fake.runtime.live == 0


def test_a_placement_without_a_kernel_there_is_an_error_even_with_fallback(fake):
    options = {"device": "cpu", "placement": {"aten::sin": "fake:1"}}
    with pytest.raises(KernelNotFoundError, match="no kernel for aten::sin on 'fake'"):
        compiled(torch.sin, **options)(torch.randn(3))


# -- training


def test_forward_and_backward(fake):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    other.load_state_dict(model.state_dict())
    run = compiled(other, **FAKE)
    for step in range(3):
        x = torch.randn(5, 4)
        for module, forward in ((model, model), (other, run)):
            module.zero_grad()
            forward(x).square().mean().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, msg=lambda text, step=step: f"step {step}: {text}")
            torch.testing.assert_close(one, two)
    programs = [report.program for report in session(**FAKE).reports]
    assert [name.rpartition("_")[2] for name in programs] == ["forward", "backward"]
    assert fake.runtime.launches.count("fake__mm") == 3 * 3  # of the backward graph


def test_gradients_of_inputs(fake):
    function = lambda x, w: torch.relu(x @ w) * 3.0
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    expected = torch.autograd.grad(function(x, w).sum(), (x, w))
    actual = torch.autograd.grad(compiled(function, **FAKE)(x, w).sum(), (x, w))
    same(actual, expected)


def test_a_tensor_that_the_operator_takes_by_name_only_comes_by_name() -> None:
    """A kernel would take it for another argument where it came by its place."""
    seen = []

    def attention(query, key, value, *rest, **named):
        seen.append((len(rest), sorted(named)))
        out, log_sum = rest[-2:]
        out.copy_(torch.nn.functional.scaled_dot_product_attention(query, key, value, named["attn_mask"]))
        log_sum.zero_()

    kernel = KernelDescriptor("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", attention)
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    mask = torch.randn(1, 1, 3, 3)
    with kagent_core.use_plugin(FakeDevice(kernels=[kernel])):
        name = "aten::_scaled_dot_product_flash_attention_for_cpu"
        out, _ = kagent_core.run_op(name, q, k, v, attn_mask=mask, device="fake:0")
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, mask))
    assert seen == [(2, ["attn_mask"])]
