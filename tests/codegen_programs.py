"""Programs of ATen operators made into one kernel each, compiled and run: what generated kernels are tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.capture.graph import CapturedGraph
from kagent_core.capture.schemas import torch_dtype
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.loops import write_loops
from kagent_core.codegen.rules import RULES
from kagent_core.config import load_config
from kagent_core.native import find_compiler, load
from kagent_core.specs import Program, TensorSpec, flatten_tensors
from kagent_cpu.language import CLanguage

Function = Callable[..., Any]


def listed(made: Any) -> list[Any]:
    """Return the results of a function as a list."""
    return list(made) if isinstance(made, (tuple, list)) else [made]


def program(function: Function, *args: Any) -> Program:
    """Return the program of a function of tensors."""
    graph = make_fx(lambda *given: listed(function(*given)), tracing_mode="fake")(*args)
    return CapturedGraph(graph, "example").program(args)


class NarrowC(CLanguage):
    """C whose indices have 32 bits where they fit, as on devices that want that."""

    narrow_indices = True


def generator(language: CLanguage | None = None) -> ExpressionGenerator:
    """Return a generator for the processor."""
    return ExpressionGenerator(language or CLanguage(), write_loops, generic=GenericKernels(GENERIC, RULES))


def source_of(made: Program, making: ExpressionGenerator | None = None) -> KernelSource:
    """Return the one kernel that all of a program becomes."""
    return (making or generator()).source(made.calls, {spec.buffer for spec in flatten_tensors(made.outputs)})


def text_of(function: Function, *args: Any, making: ExpressionGenerator | None = None) -> str:
    """Return the text of the one kernel that a function of tensors becomes."""
    return source_of(program(function, *args), making).text


def refusal(function: Function, *args: Any) -> str | None:
    """Return why a function of tensors cannot be one kernel."""
    return generator().can_generate(program(function, *args).calls)


@dataclass
class OneKernel:
    """A function of tensors as one kernel: called with the table of its arguments' addresses."""

    made: Program
    source: KernelSource
    function: Callable[[int], None]

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
        run, address = self.function, memory.data_ptr()

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


def kernels(
    cases: Sequence[tuple[Function, Sequence[Any]]], making: ExpressionGenerator | None = None
) -> list[OneKernel]:
    """Return the kernel of each function for its arguments. All are compiled at once."""
    programs = [program(function, *args) for function, args in cases]
    making = making or generator()
    sources = [source_of(made, making) for made in programs]
    texts = dict.fromkeys(source.text for source in sources)
    for number, source in enumerate(sources):
        passed = [f"({arg.type.replace('restrict', '')})a[{slot}]" for slot, arg in enumerate(source.args)]
        passed += [f"a + {len(source.args)}"] * source.reports
        texts[f"void run_{number}(i64 *a) {{ {source.name}({', '.join(passed)}); }}\n"] = None
    compiler = find_compiler()
    assert compiler is not None
    assert isinstance(making.language, CLanguage)
    library = load(making.language.preamble() + "".join(texts), load_config({"device": "cpu"}).cache_dir, compiler)
    return [
        OneKernel(made, source, library.function(f"run_{number}"))
        for number, (made, source) in enumerate(zip(programs, sources, strict=True))
    ]


def kernel(function: Function, *args: Any) -> OneKernel:
    """Return a function of tensors as one kernel."""
    return kernels([(function, args)])[0]


def check(cases: Sequence[tuple[Function, Sequence[Any]]], making: ExpressionGenerator | None = None) -> None:
    """Compare the kernel of each function with the function itself: values, types, shapes."""
    for made, (function, args) in zip(kernels(cases, making), cases, strict=True):
        for got, wanted in zip(made(*args), listed(function(*args)), strict=True):
            described = [
                f"{tuple(arg.shape)} {arg.stride()} {arg.dtype}" for arg in args if isinstance(arg, torch.Tensor)
            ]
            torch.testing.assert_close(
                got, wanted, equal_nan=True, msg=lambda text, d=described, m=made: f"{text}\n{d}\n{m.source.text}"
            )


def errors(cases: Sequence[tuple[Function, Sequence[Any]]]) -> Iterator[tuple[float, float]]:
    """Yield how far each result is from what float64 gives, as a root mean square: the kernel's and the function's."""
    for made, (function, args) in zip(kernels(cases), cases, strict=True):
        wide = [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
        for got, eager, exact in zip(made(*args), listed(function(*args)), listed(function(*wide)), strict=True):
            ours, eagers = (float((x.double() - exact).square().mean().sqrt()) for x in (got, eager))
            yield ours, eagers
