"""Programs of ATen operators made into one kernel each, compiled and run: what generated kernels are tested with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.capture.graph import CapturedGraph
from kagent_core.capture.schemas import torch_dtype
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.loops import write_loops
from kagent_core.config import load_config
from kagent_core.specs import Program, TensorSpec, flatten_tensors
from kagent_cpu.language import CLanguage
from kagent_cpu.native import Library, find_compiler, load


def program(function: Callable[..., Any], *args: Any) -> Program:
    """Return the program of a function of tensors."""

    def listed(*given: Any) -> list[Any]:
        made = function(*given)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    return CapturedGraph(make_fx(listed, tracing_mode="fake")(*args), "example").program(args)


def generator() -> ExpressionGenerator:
    """Return a generator for the processor."""
    return ExpressionGenerator(CLanguage(), write_loops)


def source_of(made: Program) -> KernelSource:
    """Return the one kernel that all of a program becomes."""
    return generator().source(made.calls, {spec.buffer for spec in flatten_tensors(made.outputs)})


def refusal(function: Callable[..., Any], *args: Any) -> str | None:
    """Return why a function of tensors cannot be one kernel."""
    return generator().can_generate(program(function, *args).calls)


def compiled(source: KernelSource) -> Library:
    """Compile a kernel as ``void run(i64 *a)``, with its arguments in a table."""
    passed = [f"({arg.type.replace('restrict', '')})a[{slot}]" for slot, arg in enumerate(source.args)]
    if source.reports:
        passed.append(f"a + {len(source.args)}")
    text = f"{source.text}\nvoid run(i64 *a) {{ {source.name}({', '.join(passed)}); }}\n"
    compiler = find_compiler()
    assert compiler is not None
    return load(CLanguage().preamble() + text, load_config({"device": "cpu"}).cache_dir, compiler)


@dataclass
class OneKernel:
    """A function of tensors as one kernel."""

    made: Program
    source: KernelSource
    library: Library

    @staticmethod
    def of(function: Callable[..., Any], *args: Any) -> OneKernel:
        """Make the kernel for some arguments."""
        made = program(function, *args)
        source = source_of(made)
        return OneKernel(made, source, compiled(source))

    def outputs(self) -> dict[int, torch.Tensor]:
        """Return new tensors for what it returns, filled with what it should not leave there."""
        found: dict[int, torch.Tensor] = {}
        for spec in flatten_tensors(self.made.outputs):
            dtype = torch_dtype(spec.dtype)
            found[spec.buffer] = torch.empty_strided(spec.shape, spec.strides, dtype=dtype).fill_(77)
        return found

    def bound(self, args: Sequence[Any], outputs: dict[int, torch.Tensor]) -> Callable[[], None]:
        """Return what runs it with some tensors."""
        specs = [spec for spec in self.made.inputs if isinstance(spec, TensorSpec)]
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        held = {spec.buffer: tensor for spec, tensor in zip(specs, tensors, strict=True)} | outputs
        table = [
            held[arg.value.buffer].data_ptr() + arg.value.storage_offset * arg.value.dtype.itemsize
            if isinstance(arg.value, TensorSpec)
            else int(arg.value)
            for arg in self.source.args
        ]
        memory = torch.tensor([*table, 0], dtype=torch.int64)
        run, address = self.library.function("run"), memory.data_ptr()

        def call() -> None:
            run(address)
            assert int(memory[-1]) == 0, "the kernel reports an error"
            assert held

        return call

    def __call__(self, *args: Any) -> list[torch.Tensor]:
        """Run it."""
        outputs = self.outputs()
        self.bound(args, outputs)()
        return [outputs[spec.buffer] for spec in flatten_tensors(self.made.outputs)]


def run(function: Callable[..., Any], *args: Any) -> list[torch.Tensor]:
    """Run a function of tensors as one kernel, and return its results."""
    return OneKernel.of(function, *args)(*args)
