"""torch's own tensors on a simulated CUDA driver: in place, in the order of torch's streams, by torch's kernels."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.testing.torch_device import held_memory, register_torch_device
from kagent_cuda import runtime, torch_cuda

from .simulated import DEVICE, Cuda, Plugin, Torch
from .test_simulated import chains, compiled


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Iterator[Callable[..., tuple[Cuda, Torch]]]:
    """Start the driver, with a torch that has CUDA."""

    def started(library: bool = False, **options: Any) -> tuple[Cuda, Torch]:
        cuda = Cuda(monkeypatch, cache_dir, **options)
        theirs = Torch(cuda)
        monkeypatch.setattr(runtime, "torch_cuda", lambda index: theirs)
        monkeypatch.setattr(torch_cuda, "torch_cuda", lambda index: theirs if library else None)
        return cuda, theirs

    torch._dynamo.reset()
    register_torch_device()
    with kagent_core.use_plugin(Plugin()), held_memory():
        yield started


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_replays(seed: int, graphs: bool, start: Callable[..., tuple[Cuda, Torch]]) -> None:
    """torch's stream fills inputs late, and overwrites them as soon as the call has returned: nobody waits for it."""
    cuda, theirs = start(seed=seed, graphs=graphs)
    torch.manual_seed(seed)
    program = compiled(chains)
    with torch.no_grad():
        for number in range(5):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            ours = theirs.given(x), theirs.given(y)
            waited = cuda.calls["sync"]
            result = program(*ours)
            assert str(result.device) == theirs.device
            assert cuda.calls["sync"] == waited, "the host waited for the device"
            for tensor in ours:
                theirs.stream.do(tensor.zero_)
            [got] = theirs.read(result)
            close(got, chains(x, y))
            if number > 1:
                assert cuda.calls["graph"] == (number if graphs else 0)
    assert (cuda.calls["update"] > 0) == graphs, "inputs moved, and no graph was told"


@pytest.mark.parametrize("graphs", [True, False])
def test_without_waits_results_are_wrong(graphs: bool, start: Callable[..., tuple[Cuda, Torch]]) -> None:
    """Else the driver would not notice one that is missing."""
    cuda, theirs = start(graphs=graphs)
    program, wrong = compiled(chains), 0
    with torch.no_grad():
        theirs.read(program(theirs.given(torch.randn(6, 6)), theirs.given(torch.randn(6, 6))))
        cuda.ignores_waits = True
        for _ in range(3):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            [got] = theirs.read(program(theirs.given(x), theirs.given(y)))
            wrong += not torch.allclose(got, chains(x, y), atol=1e-4, rtol=1e-4)
    assert wrong


@pytest.mark.parametrize("seed", range(4))
def test_another_current_stream_at_each_call(seed: int, start: Callable[..., tuple[Cuda, Torch]]) -> None:
    """A plan's memory is used on one stream after the other; between them, plans with tensors in host memory."""
    cuda, theirs = start(seed=seed)
    program = compiled(chains)
    streams = [theirs.stream, cuda._create_stream(), cuda._create_stream()]
    results = []
    with torch.no_grad():
        for number in [0, 1, 0, 2, 2, 1, 0]:
            theirs.stream = streams[number]
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            results.append((theirs.stream, program(theirs.given(x), theirs.given(y)), chains(x, y)))
            if number == 2:
                close(program(x, y), chains(x, y))
        for stream, result, expected in results:
            theirs.stream = stream
            [got] = theirs.read(result)
            close(got, expected)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "offset": lambda: torch.randn(7, 6)[2:6],
    "strided": lambda: torch.randn(8, 12)[::2, ::2],
    "transposed": lambda: torch.randn(6, 4).t(),
    "expanded": lambda: torch.randn(6).expand(4, 6),
    "0-dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 6),
    "an odd address": lambda: torch.randn(25)[1:].view(4, 6),  # not aligned for vectors of elements
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view(view: str, start: Callable[..., tuple[Cuda, Torch]]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.tanh(x) * y
        return z, z.sum(), x.t() if x.dim() == 2 else x

    _, theirs = start()
    program = compiled(function)
    for _ in range(3):
        x, y = VIEWS[view](), VIEWS[view]()
        results = program(theirs.given(x), theirs.given(y))
        for got, result, expected in zip(theirs.read(*results), results, function(x, y), strict=True):
            close(got, expected)
            assert result.stride() == expected.stride()


def test_inputs_that_are_written(start: Callable[..., tuple[Cuda, Torch]]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y).add_(1)
        return (x @ y.t()).softmax(-1)

    _, theirs = start()
    program = compiled(function)
    for _ in range(4):
        x, y = torch.randn(9, 12)[1:5, ::2], torch.randn(4, 6)
        there = theirs.given(x)
        around = torch.as_strided(there, (108,), (1,), 0)
        result = program(there, theirs.given(y))
        got, written = theirs.read(result, around)
        close(got, function(x, y))
        close(written, torch.as_strided(x, (108,), (1,), 0))


def test_memory_that_is_used_again(start: Callable[..., tuple[Cuda, Torch]]) -> None:
    """The result of one call is overwritten by torch and given to the next one, all before anything has run."""
    _, theirs = start()
    program = compiled(lambda x: (x @ x).relu() + 1)
    x = torch.randn(6, 6)
    there = theirs.given(x)
    seen = []
    with torch.no_grad():
        for _ in range(6):
            result = program(there)
            seen.append((result, (x @ x).relu() + 1))
            x = torch.randn(6, 6)
            theirs.stream.do(functools.partial(there.copy_, x))
        for result, expected in seen:
            [got] = theirs.read(result)
            close(got, expected)


def test_a_report_of_an_index(start: Callable[..., tuple[Cuda, Torch]]) -> None:
    _, theirs = start()
    program = compiled(lambda table, index: table[index] * 2)
    table = torch.randn(6, 6)
    [got] = theirs.read(program(theirs.given(table), theirs.given(torch.tensor([3, 0, 5]))))
    close(got, table[[3, 0, 5]] * 2)
    with pytest.raises(IndexError, match=r"out of bounds|out of range"):
        program(theirs.given(table), theirs.given(torch.tensor([3, 6, 5])))
    [got] = theirs.read(program(theirs.given(table), theirs.given(torch.tensor([1, 1, 5]))))
    close(got, table[[1, 1, 5]] * 2)


def test_products_are_torchs(start: Callable[..., tuple[Cuda, Torch]], caplog: pytest.LogCaptureFixture) -> None:
    """As library kernels, in their turn on the stream, and what is around them in kernels of ours."""
    cuda, theirs = start(library=True)
    program = compiled(chains)
    with torch.no_grad(), caplog.at_level(logging.INFO, "kagent.execute"):
        for _ in range(3):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            [got] = theirs.read(program(theirs.given(x), theirs.given(y)))
            close(got, chains(x, y))
    assert cuda.calls["graph"] == 0
    assert cuda.calls["torch"] == 27
    assert "started one by one: 9 of them are torch's own kernels" in caplog.text
    report = session_for(load_config(options={"device": DEVICE, "missing_kernel": "error"})).reports[-1]
    assert [reason[:28] for reason in report.not_recorded] == ["9 of them are torch's own ke"]


def learn(result: torch.Tensor, weights: torch.Tensor) -> None:
    """Compute gradients in this thread: autograd's own are those of the devices that there were when it made them."""
    with torch.autograd.set_multithreading_enabled(False):
        result.backward(weights)


def test_a_model_through_torchs_kernels(start: Callable[..., tuple[Cuda, Torch]]) -> None:
    """Convolutions forward and backward, whose results torch makes and the plan copies; parameters are torch's too."""
    cuda, theirs = start(library=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(27, 4))
    there = copy.deepcopy(model).to(theirs.device)
    program = compiled(there)
    for _ in range(3):
        x = torch.randn(5, 2, 5, 5)
        result, expected = program(theirs.given(x)), model(x)
        [got] = theirs.read(result.detach())
        close(got, expected.detach())
        weights = torch.randn(5, 4)
        learn(result, theirs.given(weights))
        expected.backward(weights)
        grads = theirs.read(*[parameter.grad for parameter in there.parameters()])
        for ours, parameter in zip(grads, model.parameters(), strict=True):
            close(ours, parameter.grad)
            parameter.grad = None
        there.zero_grad()
    assert cuda.calls["torch"] >= 12


def test_a_tensor_in_host_memory_goes_through_torchs_kernels_too(start: Callable[..., tuple[Cuda, Torch]]) -> None:
    cuda, _ = start(library=True)
    program = compiled(chains)
    with torch.no_grad():
        for _ in range(3):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            close(program(x, y), chains(x, y))
    assert cuda.calls["torch"] == 27


class Layers(torch.nn.Module):
    """Operators of which PyTorch's own results differ between devices in what nobody reads, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.batch_norm, self.group_norm = torch.nn.BatchNorm2d(4), torch.nn.GroupNorm(2, 4)
        self.layer_norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer_norm(self.embedding(tokens))
        y = self.group_norm(self.batch_norm(self.conv(x.unsqueeze(1)))).amax(1)
        y = torch.nn.functional.max_pool1d(y, 2).repeat_interleave(2, -1)
        q, k, v = (t.unsqueeze(1) for t in (self.linear(y), x, y))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("library", [False, True])
def test_layers(library: bool, training: bool, start: Callable[..., tuple[Cuda, Torch]]) -> None:
    _, theirs = start(library=library)
    torch.manual_seed(0)
    model = Layers().train(training)
    there = copy.deepcopy(model).to(theirs.device)
    program = compiled(there)
    for _ in range(2):
        tokens = torch.randint(11, (3, 6))
        with torch.set_grad_enabled(training):
            result, expected = program(theirs.given(tokens)), model(tokens)
        [got] = theirs.read(result.detach())
        close(got, expected.detach())
        if training:
            weights = torch.randn_like(expected)
            learn(result, theirs.given(weights))
            expected.backward(weights)
            grads = theirs.read(*[parameter.grad for parameter in there.parameters()])
            for ours, parameter in zip(grads, model.parameters(), strict=True):
                torch.testing.assert_close(ours, parameter.grad, atol=1e-3, rtol=1e-3)
                parameter.grad = None
            there.zero_grad()
            for ours, buffer in zip(theirs.read(*there.buffers()), model.buffers(), strict=True):
                close(ours, buffer)
