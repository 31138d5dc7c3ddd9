"""``python -m kagent_core.bench.attention``: attention on the CPU, by the kernel that kagent takes and by ATen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.bench.timing import Timing, calls_per_round, one_thread, time_calls
from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import load_config
from kagent_core.pipeline import build_plan
from kagent_core.session import session_for

aten = torch.ops.aten

ROUNDS, MOST_CALLS = 20, 200

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionCase:
    """What is computed.

    Attributes
    ----------
    batch, heads, queries, keys, size
        The last is that of a head.
    dtype
        Of queries, keys and values.
    causal
        Whether later keys are hidden.
    masked
        Whether a number is added to every score of a text.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    masked: bool = False

    @property
    def operations(self) -> int:
        """Multiplications and additions, those of hidden scores included."""
        return 4 * self.batch * self.heads * self.queries * self.keys * self.size

    def tensors(self) -> Tensors:
        """Return queries, keys and values as they lie after one projection, and the mask."""

        def heads(length: int) -> torch.Tensor:
            packed = torch.randn(self.batch, length, 3 * self.heads * self.size).to(self.dtype)
            return packed[..., : self.heads * self.size].view(self.batch, length, self.heads, -1).transpose(1, 2)

        mask = (torch.randn(self.batch, 1, self.queries, self.keys).to(self.dtype),) if self.masked else ()
        return heads(self.queries), heads(self.keys), heads(self.keys), *mask

    def compute(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Tensors:
        """Compute it as ATen does: the attention, and the logarithms of its sums."""
        made: Tensors = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.causal, attn_mask=mask[0] if mask else None
        )
        return made

    def __str__(self) -> str:
        shape = f"{self.batch} x {self.heads} x {self.queries} x {self.size}, {self.keys} keys"
        marks = (str(self.dtype).removeprefix("torch."), *["causal"] * self.causal, *["masked"] * self.masked)
        return f"{shape}, {', '.join(marks)}"


SHAPES = (
    *((8, 12, 128, 128, 32), (1, 12, 197, 197, 64), (1, 4, 64, 64, 64), (8, 4, 128, 128, 64), (1, 8, 512, 512, 64)),
    *((1, 8, 1024, 1024, 64), (1, 8, 256, 256, 128), (4, 8, 64, 64, 80), (8, 16, 49, 49, 32), (8, 4, 16, 16, 64)),
    *((1, 4, 1, 256, 64), (1, 12, 1, 1024, 64), (1, 8, 4, 512, 64), (1, 8, 5, 512, 64)),
)
CASES = (
    *(AttentionCase(*shape) for shape in SHAPES),
    *(AttentionCase(*shape, masked=True) for shape in SHAPES[:3]),
    *(AttentionCase(*shape, causal=True) for shape in SHAPES[3:5]),
    *(AttentionCase(*shape, dtype=torch.bfloat16) for shape in SHAPES[1:3]),
)


def plan_of(case: AttentionCase, tensors: Tensors) -> tuple[Callable[[], object], str]:
    """Return what runs a case as a part of a compiled model does, and the name of the kernel that it takes."""
    graph = CapturedGraph(make_fx(case.compute, tracing_mode="fake")(*tensors), "attention")
    session = session_for(load_config(options={"device": "cpu"}))
    plan = build_plan(session, graph.program(tensors), graph.constants)
    return lambda: plan.run(list(tensors)), plan.tasks[0].kernel.name


def measure(case: AttentionCase) -> tuple[dict[str, Timing], str]:
    """Return the times of a call of each contender, in one thread, and the name of kagent's kernel."""
    tensors = case.tensors()
    run, kernel = plan_of(case, tensors)
    contenders: dict[str, Callable[[], object]] = {"aten": lambda: case.compute(*tensors), "kagent": run}
    with torch.no_grad(), one_thread():
        return time_calls(contenders, calls_per_round(contenders["aten"], MOST_CALLS), ROUNDS), kernel


def print_cases(console: Console, cases: Sequence[AttentionCase]) -> None:
    """Measure cases and print a table."""
    columns = (
        "batch x heads x queries x size",
        "ATen, us",
        "GFLOP/s",
        "kagent, us",
        "GFLOP/s",
        "times as fast",
        "kernel",
    )
    table = Table(*columns, title="attention on the CPU, one thread, minimum of the rounds")
    for case in cases:
        times, kernel = measure(case)
        aten_us, own_us = times["aten"].minimum, times["kagent"].minimum
        rates = [f"{case.operations / us / 1000:.0f}" for us in (aten_us, own_us)]
        origin = "ATen's" if kernel.startswith("aten::") else "generated"
        table.add_row(
            str(case), f"{aten_us:.1f}", rates[0], f"{own_us:.1f}", rates[1], f"{aten_us / own_us:.2f}", origin
        )
    console.print(table)


if __name__ == "__main__":
    torch.manual_seed(0)
    print_cases(Console(width=140), CASES)
