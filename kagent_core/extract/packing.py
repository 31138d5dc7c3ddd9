"""Packing for kernels that are Python callables: the operator's own arguments, then the results to fill."""

from __future__ import annotations

from typing import Any

from kagent_core.capture.schemas import ArgumentSchema, schema_of
from kagent_core.device import ArgumentPacker
from kagent_core.errors import PackingError
from kagent_core.specs import Access, KernelDescriptor, OpCall, PackedArg, flatten_tensors


class CallPacker(ArgumentPacker):
    """Packs the operator's arguments for a callable kernel, as a call of the operator itself would.

    A kernel that does not allocate its results gets them by name after the arguments: by the names of its
    prototype's OUT parameters, or ``out`` (``out0``, ``out1``, ... when there are several).
    """

    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return the arguments in the schema's order, then the results.

        Raises
        ------
        PackingError
            When the kernel's prototype declares another number of results than the operator has.
        """
        packed: list[PackedArg] = []
        by_keyword = False
        for argument in schema_of(call.overload).arguments:
            if argument.name not in call.arguments:
                by_keyword = True  # a default was left out: everything after it goes by name
                continue
            value = call.arguments[argument.name]
            keyword = by_keyword or argument.keyword_only
            packed.append(PackedArg(argument.name, value, _access(argument, value), keyword))
        if not kernel.allocates:
            packed += self._results(call, kernel)
        return tuple(packed)

    def _results(self, call: OpCall, kernel: KernelDescriptor) -> list[PackedArg]:
        results = call.fresh_results
        names = [p.name for p in kernel.parameters if p.access is Access.OUT]
        if not names:
            names = ["out"] if len(results) == 1 else [f"out{i}" for i in range(len(results))]
        if len(names) != len(results):
            raise PackingError(
                f"kernel '{kernel.name}' declares {len(names)} results ({', '.join(names)}), but {call.signature} "
                f"has {len(results)}",
                hint="declare one OUT parameter per tensor that the operator returns",
            )
        return [PackedArg(name, spec, Access.OUT, keyword=True) for name, spec in zip(names, results, strict=True)]


def _access(argument: ArgumentSchema, value: Any) -> Access | None:
    if next(iter(flatten_tensors(value)), None) is None:
        return None
    return Access.INOUT if argument.writes else Access.IN
