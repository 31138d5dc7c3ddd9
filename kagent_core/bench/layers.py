"""``python -m kagent_core.bench.layers``: layers with constant weights on the CPU, generated kernels and oneDNN's.

Each layer is there several times, with weights of its own, so that these come from memory as they do in a model. Both
contenders are plans of kagent's: one has no generated kernels, so that oneDNN computes what it can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from kagent_core.bench.models.contenders import own_call
from kagent_core.bench.timing import no_collection, one_thread
from kagent_core.hooks import hookimpl
from kagent_core.session import use_plugin
from kagent_core.specs import TaskFinished

ROUNDS = 15

WEIGHTS_NBYTES, MOST_COPIES = 80 * 10**6, 64
"""How much memory the weights of all copies of a layer take together, at most, and how many copies there are."""

CONTENDERS = {"oneDNN": {"generated_kernels": "off"}, "generated": {}}
"""Names, and what differs in their config."""


@dataclass(frozen=True)
class LayerCase:
    """A layer and what it is given.

    Attributes
    ----------
    name
        For the table.
    make
        Makes one with weights of its own.
    shape
        Of what it is given; an image is channels-last, as in the middle of a network.
    operations
        Multiplications and additions, those with zeros in the padding included.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    operations: int


class Copies(nn.Module):
    """Layers that are all given the same.

    Parameters
    ----------
    make
        Makes a layer.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        first = make()
        nbytes = sum(parameter.nbytes for parameter in first.parameters())
        others = min(MOST_COPIES, max(1, WEIGHTS_NBYTES // nbytes)) - 1
        self.layers = nn.ModuleList([first, *(make() for _ in range(others))])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return what each layer makes of the input."""
        return [layer(x) for layer in self.layers]


class Lstm(nn.Module):
    """One layer of an LSTM, as ``torch.lstm``: Dynamo leaves `torch.nn.LSTM` to eager PyTorch.

    Parameters
    ----------
    width
        Of the input and of the state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.LSTM(width, width).parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return all states of a batch of sequences [steps, batch, width], which begin with zeros."""
        start = x.new_zeros(1, x.shape[1], x.shape[2])
        return torch.lstm(x, (start, start), list(self.weights), True, 1, 0.0, False, False, False)[0]


def product(rows: int, depth: int, columns: int) -> LayerCase:
    """Return a product with a weight [columns, depth]."""
    name = f"{rows} × {depth:,} × {columns:,}"
    operations = 2 * rows * depth * columns
    return LayerCase(name, lambda: nn.Linear(depth, columns, bias=False), (rows, depth), operations)


def convolution(channels: int, size: int, filters: int, window: int, stride: int = 1) -> LayerCase:
    """Return a convolution of an image, padded to keep its size where there is no stride, and a relu."""
    padding = window // 2
    made = (size + 2 * padding - window) // stride + 1

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, filters, window, stride, padding), nn.ReLU())

    name = f"{channels} × {size} × {size}, {filters}, {window} × {window}" + (f", {stride}" if stride > 1 else "")
    operations = 2 * channels * window * window * filters * made * made
    return LayerCase(name, make, (1, channels, size, size), operations)


def lstm(steps: int, batch: int, width: int) -> LayerCase:
    """Return a layer of an LSTM."""
    operations = 2 * steps * batch * 4 * width * 2 * width
    return LayerCase(f"{steps} × {batch} × {width}", lambda: Lstm(width), (steps, batch, width), operations)


TABLES = {
    "product: rows × depth × columns": (
        *(product(1, 768, 3072), product(49, 384, 384), product(49, 384, 1536), product(128, 256, 256)),
        *(product(128, 256, 688), product(128, 256, 1024), product(197, 192, 768), product(256, 384, 1536)),
        *(product(256, 4096, 1024), product(1024, 1536, 1536)),
    ),
    "convolution and relu: source, filters, window, stride": (
        *(convolution(64, 56, 64, 3), convolution(128, 28, 128, 3), convolution(256, 14, 256, 3)),
        *(convolution(512, 7, 512, 3), convolution(256, 14, 512, 3, 2), convolution(256, 14, 512, 1, 2)),
        *(convolution(512, 7, 2048, 1), convolution(16, 128, 16, 3), convolution(32, 32, 64, 3)),
    ),
    "LSTM: steps × sequences × width": (
        *(lstm(64, 1, 256), lstm(64, 4, 256), lstm(64, 8, 256), lstm(64, 32, 128), lstm(64, 32, 256)),
        *(lstm(64, 8, 512), lstm(64, 8, 1024)),
    ),
}


class _Observer:
    """A plugin that keeps the least time of each task."""

    def __init__(self) -> None:
        self.least_ms: dict[int, float] = defaultdict(lambda: float("inf"))

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        self.least_ms[event.task.id] = min(self.least_ms[event.task.id], event.elapsed_ms)


def measure(case: LayerCase, rounds: int = ROUNDS) -> dict[str, float]:
    """Return how many milliseconds the tasks of one layer take, by contender, in one thread.

    Of each task, the least time of all rounds counts.
    """
    layers, x = Copies(case.make).eval(), torch.randn(case.shape)
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    observers, calls = {name: _Observer() for name in CONTENDERS}, []
    with torch.no_grad(), one_thread():
        for name, differing in CONTENDERS.items():
            options: Any = {"device": "cpu", "profile": True, **differing}
            with use_plugin(observers[name]):
                calls.append(torch.compile(own_call(layers), backend="kagent", dynamic=False, options=options))
                calls[-1](x)
        with no_collection():
            for _ in range(rounds):
                for call in calls:
                    call(x)
    return {name: sum(each.least_ms.values()) / len(layers.layers) for name, each in observers.items()}


def print_cases(console: Console, title: str, cases: Sequence[LayerCase], rounds: int = ROUNDS) -> None:
    """Measure cases and print a table."""
    kind, _, columns = title.partition(": ")
    names = [column for name in CONTENDERS for column in (f"{name}, us", "GFLOP/s")]
    table = Table(columns, *names, "times as fast", title=f"{kind} on the CPU, one thread, least times")
    for case in cases:
        times = measure(case, rounds)
        cells = [cell for ms in times.values() for cell in (f"{ms * 1e3:.1f}", f"{case.operations / ms / 1e6:.0f}")]
        table.add_row(case.name, *cells, f"{times['oneDNN'] / times['generated']:.2f}")
    console.print(table)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each, cases in TABLES.items():
        print_cases(Console(width=110), each, cases)
