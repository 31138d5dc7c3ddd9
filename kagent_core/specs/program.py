"""Programs: operator calls in a valid order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kagent_core.specs.tensors import BufferSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where in the user's program an operator comes from: a Python stack, innermost frame last."""

    stack: str = ""

    @property
    def line(self) -> str | None:
        """``file:number: code`` of the innermost frame, or None when the stack is unknown."""
        frame = r'File "([^"]+)", line (\d+), in [^\n]*(?:\n(?![ \t]*File ")[ \t]+([^\n]+))?'
        frames = re.findall(frame, self.stack)
        if not frames:
            return None
        path, number, code = frames[-1]
        return f"{path}:{number}: {code.strip()}" if code else f"{path}:{number}"


class SizeNumber(int):
    """An argument that is a number and follows from sizes of the inputs: with other sizes it is another one."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator.

    Attributes
    ----------
    id
        Position in the program.
    name
        A readable, unique name, such as ``addmm_3``.
    signature
        The exact ATen overload, such as ``aten::add.Tensor``.
    arguments
        Values by the schema's argument names, in the schema's order, only those that were given. A tensor is
        a `TensorSpec`; lists are tuples; dtypes, devices and the like are torch's own objects.
    inputs
        Every tensor among the arguments, those that are written included.
    outputs
        Every tensor that the call writes: arguments written in place, then results in new buffers.
    results
        What the call returns, flattened: a spec per tensor (it may alias an input), None for a missing one.
    provenance
        Line of the user's program.
    random
        Whether the call draws from the random number generator.
    overload
        torch's ``OpOverload``, for devices that run PyTorch's own kernels.
    inserted
        Why kagent added the call, for one that is not in the user's program; else None.
    """

    id: int
    name: str
    signature: str
    arguments: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]
    provenance: Provenance = Provenance()
    random: bool = False
    overload: Any = field(default=None, repr=False, compare=False)
    inserted: str | None = None

    @property
    def fresh_results(self) -> tuple[TensorSpec, ...]:
        """Results that lie in buffers of their own, in order."""
        given = {spec.buffer for spec in self.inputs}
        return tuple(spec for spec in self.results if spec is not None and spec.buffer not in given)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={format_value(value)}" for name, value in self.arguments.items())
        made = ", ".join("None" if spec is None else str(spec) for spec in self.results)
        return f"{self.name}: {self.signature}({given}) -> ({made})"


def format_value(value: Any) -> str:
    """Return an argument as one short line of text."""
    if isinstance(value, tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return str(value) if isinstance(value, TensorSpec) else repr(value)


@dataclass(frozen=True, slots=True)
class InputRef:
    """A program output that is one of the inputs itself, by position."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A program output that is the same tensor as an earlier output, by position."""

    index: int


@dataclass(frozen=True, slots=True)
class SeedInput:
    """A tensor that is filled when a program is called: a seed for the random numbers that devices make.

    Attributes
    ----------
    tensor
        An int64 matrix with a row for each call: the seed, and the number of the call's stream, which is the row's own.
    generator
        What the seed is drawn from: a ``torch.Generator`` on the CPU, None for PyTorch's default one.
    """

    tensor: TensorSpec
    generator: Any = None


@dataclass(frozen=True, slots=True)
class Program:
    """A captured graph for one set of shapes: operator calls in a valid order.

    Attributes
    ----------
    calls
        The operators. Views are not among them: they are specs on their base's buffer.
    buffers
        Every piece of memory, by id.
    inputs
        A spec per tensor input, the value itself for an integer input.
    outputs
        A spec per tensor output, an `InputRef` where an input is returned as it is, an `OutputRef` where a tensor is
        returned again, else the value itself.
    constants
        A spec per constant of the graph, each on a buffer of its own.
    anchored
        Inputs whose buffer begins with their storage rather than with their first element, because the program
        addresses them absolutely; it holds for one storage offset of theirs only.
    fixed
        Inputs that kagent makes itself, from a model's parameters: they always come as they were captured, and a
        packed one is understood by the kernels that it was packed for, and has no strides.
    seeds
        What calls with random numbers get beside the inputs, on input buffers of their own.
    name
        For logs and dumps.
    """

    calls: tuple[OpCall, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    constants: tuple[TensorSpec, ...] = ()
    anchored: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    seeds: tuple[SeedInput, ...] = ()
    name: str = "program"
