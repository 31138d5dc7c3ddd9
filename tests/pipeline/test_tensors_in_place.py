"""Tensors of a torch device in whose memory kagent computes: used where they lie, written there, and returned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.errors import CaptureError
from kagent_core.testing.fake import FakeDevice
from kagent_core.testing.operator_samples import operator_calls
from kagent_core.testing.torch_device import TORCH_DEVICE, TorchMemoryRuntime, register_torch_device

from .traced import session

OPTIONS = {"device": "fake:0"}


@pytest.fixture(scope="module", autouse=True)
def torch_device() -> None:
    register_torch_device()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture(params=[1, 3], ids=["one stream", "three streams"])
def runtime(request: pytest.FixtureRequest) -> Iterator[TorchMemoryRuntime]:
    runtime = TorchMemoryRuntime(streams=request.param, delay_ms=0.5)
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        yield runtime


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, strides and offset included, on the torch device."""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat.to(TORCH_DEVICE).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="kagent", options={**OPTIONS, **options})


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert str(got.device) == TORCH_DEVICE
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got.cpu(), expected)


VIEWS = {
    "contiguous": lambda: torch.randn(4, 6),
    "offset": lambda: torch.randn(7, 6)[2:6],
    "strided": lambda: torch.randn(8, 12)[::2, ::2],
    "transposed": lambda: torch.randn(6, 4).t(),
    "expanded": lambda: torch.randn(6).expand(4, 6),
    "expanded column": lambda: torch.randn(5, 1)[1:].expand(4, 6),
    "one element of many": lambda: torch.randn(9)[4],
    "0-dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 6),
    "empty with an offset": lambda: torch.randn(5, 6)[5:],
}


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y) + x


@pytest.mark.parametrize("view", VIEWS)
def test_a_view(view: str, runtime: TorchMemoryRuntime) -> None:
    run = compiled(chain)
    for _ in range(3):  # other tensors each time
        x, y = VIEWS[view](), VIEWS[view]()
        same(run(on_device(x), on_device(y)), chain(x, y))
    assert runtime.copied_in == runtime.copied_out == 0, "a tensor was copied"
    [report] = session(**OPTIONS).reports
    assert (report.fallbacks, report.transfers, report.in_place) == ((), 0, 3)


@pytest.mark.parametrize("view", [name for name in VIEWS if "expanded" not in name])
def test_a_view_that_is_written(view: str, runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y)
        return x + y

    run = compiled(function)
    for _ in range(3):
        x, y = VIEWS[view](), VIEWS[view]()
        there, around = on_device(x), x.clone()
        whole = torch.as_strided(there, (there.untyped_storage().nbytes() // 4,), (1,), 0)
        address = there.data_ptr()
        same(run(there, on_device(y)), function(x, y))
        torch.testing.assert_close(there.cpu(), x)
        assert there.data_ptr() == address
        untouched = torch.as_strided(x, (x.untyped_storage().nbytes() // 4,), (1,), 0)
        torch.testing.assert_close(whole.cpu(), untouched)  # what lies between and around its elements too
        assert around.shape == x.shape


# -- aliases


def test_outputs_that_are_inputs_and_views(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return x.t(), y, y[1:], y.t()[2], x, y.view(torch.int32)

    run = compiled(function)
    for _ in range(2):
        x = torch.randn(8, 12)[1:5, ::2]
        there = on_device(x)
        got = run(there)
        for one, expected in zip(got, function(x), strict=True):
            same(one, expected)
        assert got[4] is there
        assert got[0].data_ptr() == there.data_ptr()
        assert got[0].untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        assert got[2].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
        got[1].zero_()
        assert not got[3].cpu().any()
    assert runtime.copied_in == runtime.copied_out == 0


def test_inputs_that_share_memory(runtime: TorchMemoryRuntime) -> None:
    run = compiled(chain)
    x = torch.randn(10)
    there = on_device(x)
    same(run(there[:8], there[2:]), chain(x[:8], x[2:]))
    same(run(there[2:], there[:8]), chain(x[2:], x[:8]))
    same(run(there[:8], there[:8]), chain(x[:8], x[:8]))


def test_a_written_input_that_shares_memory(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(x)
        return torch.relu(y)

    run = compiled(function)
    for apart in (True, False):
        x = torch.randn(10)
        there = on_device(x)
        ours = (there[:5], there[5:]) if apart else (there[:6], there[3:9])
        theirs = (x[:5], x[5:]) if apart else (x[:6], x[3:9])
        same(run(*ours), function(*theirs))
        torch.testing.assert_close(there.cpu(), x)


def test_an_input_that_is_returned_written(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(x)
        return x, x[1:]

    x = torch.randn(4, 3)
    there = on_device(x)
    got, part = compiled(function)(there)
    expected = function(x)[0]
    assert got is there
    same(there, expected)
    assert part.data_ptr() == there.data_ptr() + 12


# -- tensors here and there


def test_a_tensor_in_host_memory_among_others(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * y.to(TORCH_DEVICE)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    run = compiled(function)
    for _ in range(2):
        same(run(on_device(x), y), torch.relu(x) * y)
    number = torch.tensor(3.0)  # as eager PyTorch: a number may come from anywhere
    same(compiled(lambda x, y: torch.relu(x) * y)(on_device(x), number), torch.relu(x) * 3)


def test_what_eager_refuses_is_refused(runtime: TorchMemoryRuntime) -> None:
    x, y = torch.randn(3), torch.randn(3)
    with pytest.raises(Exception, match=r"(?i)device"):
        compiled(lambda x, y: x * y)(on_device(x), y)


def test_results_lie_where_the_program_has_them(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return y, y.cpu(), torch.ones(3, device=x.device), torch.arange(3, device=x.device), torch.ones(2)

    x = torch.randn(4, 3)
    got = compiled(function)(on_device(x))
    assert [t.device.type for t in got] == ["privateuseone", "cpu", "privateuseone", "privateuseone", "cpu"]
    for one, expected in zip(
        got, (torch.relu(x), torch.relu(x), torch.ones(3), torch.arange(3), torch.ones(2)), strict=True
    ):
        torch.testing.assert_close(one.cpu(), expected)


def test_a_tensor_that_moves_between(runtime: TorchMemoryRuntime) -> None:
    """What lies in host memory is still copied, in a graph whose tensors all do."""
    x = torch.randn(4, 3)
    run = compiled(chain)
    torch.testing.assert_close(run(x, x), chain(x, x))
    same(run(on_device(x), on_device(x)), chain(x, x))
    torch.testing.assert_close(run(x, x), chain(x, x))


def test_another_torch_device_is_refused(runtime: TorchMemoryRuntime) -> None:
    with pytest.raises(CaptureError, match=r"is on 'meta', but kagent takes .* or on 'privateuseone:0' for fake:0"):
        kagent_core.run_op("aten::relu", torch.randn(3, device="meta"), **OPTIONS)
    with pytest.raises(CaptureError, match=r"an output of .* is on 'meta'"):
        compiled(lambda x: torch.relu(x).to("meta"))(on_device(torch.randn(3)))


def test_a_device_without_torch_memory_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with kagent_core.use_plugin(FakeDevice()), pytest.raises(CaptureError, match=r"takes tensors in host memory\n"):
        kagent_core.run_op("aten::relu", on_device(torch.randn(3)), **OPTIONS)


# -- the fallback device


def test_an_operator_without_a_kernel(runtime: TorchMemoryRuntime, caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x).sort(0).values
        return torch.relu(y) + x, y

    run = compiled(function)
    with caplog.at_level(logging.WARNING, "kagent.schedule"):
        for _ in range(3):
            x = torch.randn(9, 12)[1:5, ::2]
            for one, expected in zip(run(on_device(x)), function(x), strict=True):
                same(one, expected)
    [report] = session(**OPTIONS).reports
    assert [fallback.signature for fallback in report.fallbacks] == ["aten::sort"]
    assert report.transfers == 2
    assert "do not run on fake:0" in caplog.text


def test_a_fallback_reads_and_writes_what_is_given(runtime: TorchMemoryRuntime) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y.copy_(torch.relu(y))
        x.cumsum_(0)  # no kernel for it
        y.add_(x)
        return torch.relu(x), x.t()

    run = compiled(function)
    for _ in range(3):
        x, y = torch.randn(9, 12)[1:5, ::2], torch.randn(6, 4).t()
        ours, ours_too = on_device(x), on_device(y)
        around = torch.as_strided(ours, (108,), (1,), 0)
        got = run(ours, ours_too)
        for one, expected in zip(got, function(x, y), strict=True):
            same(one, expected)
        same(ours, x)
        same(ours_too, y)
        torch.testing.assert_close(around.cpu(), torch.as_strided(x, (108,), (1,), 0))


def test_results_of_unknown_size(runtime: TorchMemoryRuntime) -> None:
    x = torch.tensor([1.0, 0.0, 2.0])
    same(kagent_core.run_op("aten::nonzero", on_device(x), **OPTIONS), x.nonzero())


# -- one operator, constants, gradients


def test_one_operator(runtime: TorchMemoryRuntime) -> None:
    for make in VIEWS.values():
        x = make()
        same(kagent_core.run_op("aten::relu", on_device(x), **OPTIONS), torch.relu(x))
        torch.testing.assert_close(kagent_core.run_op("aten::relu", x, **OPTIONS), torch.relu(x))
    assert runtime.copied_in > 0


def test_an_operator_on_overlapping_memory(runtime: TorchMemoryRuntime) -> None:
    """Eager PyTorch runs it, and says what it thinks of it."""
    there = on_device(torch.randn(8))
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        kagent_core.run_op("aten::add_.Tensor", there[:6], there[2:], **OPTIONS)


def test_a_constant_of_the_graph(runtime: TorchMemoryRuntime) -> None:
    constant = torch.randn(3)
    there = on_device(constant)
    x = torch.randn(4, 3)
    run = compiled(lambda x: torch.relu(x) * there)
    for _ in range(2):
        same(run(on_device(x)), torch.relu(x) * constant)
    there.zero_()
    same(run(on_device(x)), torch.relu(x) * 0)


def test_a_model_that_learns(runtime: TorchMemoryRuntime) -> None:
    x, target = torch.randn(8, 5), torch.randn(8, 3)

    def train(device: str, prepare: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run, losses = prepare(model), []
        for _ in range(4):
            loss = (run(x.to(device)) - target.to(device)).pow(2).mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            with torch.autograd.set_multithreading_enabled(False):  # its threads are those of the devices of before
                loss.backward()
            optimizer.step()
        return losses

    assert train(TORCH_DEVICE, compiled) == pytest.approx(train("cpu", lambda model: model), rel=1e-4)


class _Scaled(torch.nn.Module):
    """Of its parameters alone something can be computed ahead."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * torch.relu(self.scale * self.scale)


@pytest.mark.parametrize("parameters", ["checked", "version", "copied"])
def test_parameters_are_never_stale(parameters: str, runtime: TorchMemoryRuntime) -> None:
    torch.manual_seed(0)
    model = _Scaled(5).requires_grad_(False).eval()
    x = torch.randn(4, 5)
    there = copy.deepcopy(model).to(TORCH_DEVICE)
    run = compiled(there, parameters=parameters)
    for step in range(5):
        with torch.no_grad():
            torch.testing.assert_close(run(on_device(x)).cpu(), model(x), atol=1e-5, rtol=1e-5)
            for ours, theirs in zip(there.parameters(), model.parameters(), strict=True):
                if parameters == "version" or step % 2:
                    ours.mul_(1.5)
                else:
                    ours.data.mul_(1.5)  # which moves no version counter
                theirs.mul_(1.5)


# -- memory and order


def test_memory_is_torchs(runtime: TorchMemoryRuntime) -> None:
    run = compiled(chain)
    x, y = on_device(torch.randn(4, 3)), on_device(torch.randn(4, 3))
    kept = [run(x, y)]
    imported = runtime.calls["import_tensor"]
    assert imported == 3
    for _ in range(3):
        kept = [run(x, y)]
    assert runtime.calls["import_tensor"] <= imported + 3, "only results move"
    assert runtime.imported == 3
    assert kept
    x = on_device(torch.randn(4, 3))
    run(x, y)
    assert runtime.imported == 3
    torch._dynamo.reset()
    del run
    kagent_core.run_op("aten::relu", x, **OPTIONS)  # plans that are gone are given up when another one is made
    assert runtime.imported <= 2


def test_torch_is_waited_for(runtime: TorchMemoryRuntime) -> None:
    """A runtime that knows nothing of streams: the core waits for torch, and for the runtime."""
    module = register_torch_device()
    x = on_device(torch.randn(4, 3))
    run = compiled(chain)
    run(x, x)
    before, synchronized = module.synchronized, runtime.calls["synchronize"]
    run(x, x)
    assert module.synchronized == before + 1
    assert runtime.calls["synchronize"] == synchronized + 1


def test_samples_of_operators_that_draw_random_numbers_run_beside_it() -> None:
    """PyTorch saves and restores the random state of every accelerator around them."""
    assert operator_calls("aten::_scaled_dot_product_flash_attention_for_cpu", [torch.float32], samples=1)


class _Ordered(TorchMemoryRuntime):
    """A runtime that orders its launches with torch's by itself, and notes in which order it is asked what."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def after_torch(self) -> bool:
        self.log.append("after torch")
        return True

    def before_torch(self) -> bool:
        self.log.append("before torch")
        self._wait()  # for the test: torch's operators on the host wait for nobody
        return True

    def launch_on(self, *args: Any) -> None:
        self.log.append("launch")
        super().launch_on(*args)

    def copy_in(self, *args: Any) -> None:
        self.log.append("copy in")
        super().copy_in(*args)

    def copy_out(self, *args: Any) -> None:
        self.log.append("copy out")
        super().copy_out(*args)

    def synchronize(self) -> None:
        self.log.append("synchronize")
        super().synchronize()


def test_a_runtime_that_orders_is_not_waited_for() -> None:
    runtime, module = _Ordered(), register_torch_device()
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        x = on_device(torch.randn(4, 3))
        run = compiled(chain)
        run(x, x)
        waited = module.synchronized
        runtime.log.clear()
        same(run(x, x), chain(x.cpu(), x.cpu()))
        assert runtime.log == ["after torch", *["launch"] * 3, "before torch"]
        assert module.synchronized == waited


def test_copies_for_a_fallback_are_ordered_too() -> None:
    runtime = _Ordered()
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        x = torch.randn(9, 12)
        there = on_device(x)
        for _ in range(2):
            runtime.log.clear()
            kagent_core.run_op("aten::cumsum_", there[1:5, ::2], 0, **OPTIONS)  # no kernel for it
            x[1:5, ::2].cumsum_(0)
            same(there, x)
            assert runtime.log == ["after torch", "copy out", "before torch"]  # torch copies what comes back
        run = compiled(lambda x: torch.relu(torch.relu(x).cumsum(0)))
        for _ in range(2):
            runtime.log.clear()
            same(run(there), torch.relu(torch.relu(x).cumsum(0)))
        ours = ["after torch", "launch", "before torch"]
        # what is copied lies in memory of the device's own
        assert runtime.log == [*ours, "copy out", "copy in", *ours]
        run = compiled(lambda x: torch.relu(x).cumsum(0))
        for _ in range(2):
            runtime.log.clear()
            same(run(there), torch.relu(x).cumsum(0))
        assert runtime.log[-3:] == ["after torch", "copy in", "before torch"]
