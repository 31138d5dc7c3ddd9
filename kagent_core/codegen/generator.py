"""The core's code generator: from a group of operators to a kernel in a C-family language."""

from __future__ import annotations

import hashlib
import operator
import re
import struct
from collections.abc import Callable, Collection, Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.generic import GenericKernels
from kagent_core.codegen.kernel import KernelArg, KernelSource, LoopNest
from kagent_core.codegen.lowering import Lowering, NotLoweredError
from kagent_core.codegen.merging import merge_axes
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.table import RuleTable
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import KernelDescriptor, OpCall, PackedArg, TensorSpec

log = get_logger("codegen")

WriteLoops = Callable[[LoopNest, CFamily, str], KernelSource]
"""Writes a loop nest in a device's language."""

NAME_LENGTH = 60
"""Longest part of a kernel's name that its operators' names make."""


class ExpressionGenerator:
    """Makes kernels of operators that have lowering rules, one by one and fused.

    Parameters
    ----------
    language
        The device's C-like language.
    write_loops
        How loops become text in it.
    round_halves
        Whether half types are rounded after every operator, as eager PyTorch does.
    rules
        By default the core's own.
    generic
        Parametrised kernels for what is no loop nest; None for none.
    fuses_generic
        Whether pointwise operators are computed where a parametrised kernel stores its result: not where the device has
        better kernels of its own.
    prefers_all
        Whether generated kernels outrank all that the device's own registry resolves. Else those of loop nests do, and
        parametrised ones do not.
    """

    def __init__(
        self,
        language: CFamily,
        write_loops: WriteLoops,
        round_halves: bool = True,
        rules: RuleTable = RULES,
        generic: GenericKernels | None = None,
        fuses_generic: bool = True,
        prefers_all: bool = False,
    ) -> None:
        self.language = language
        self._write_loops = write_loops
        self._round_halves = round_halves
        self._rules = rules
        self._generic = generic
        self._fuses_generic = fuses_generic
        self._prefers_all = prefers_all
        self._latest: tuple[tuple[OpCall, ...], frozenset[int], str | None] | None = None

    def can_generate(self, calls: Sequence[OpCall], inner: Collection[int] = ()) -> str | None:
        """Return why no kernel can be made of some calls, or None when one can."""
        key, within = tuple(calls), frozenset(inner)
        latest = self._latest
        same = latest is not None and latest[1] == within and len(latest[0]) == len(key)
        if latest is not None and same and all(map(operator.is_, latest[0], key)):
            return latest[2]
        refusal = self._refusal(key, within)
        self._latest = (key, within, refusal)
        return refusal

    def prefers(self, call: OpCall) -> bool:
        """Return whether a kernel made for one call outranks what the registry's resolver finds."""
        return self._prefers_all or call.signature in self._rules

    def generate(self, calls: Sequence[OpCall], group: OpCall) -> KernelDescriptor:
        """Return the kernel for some calls, of which `can_generate` was None, with its arguments packed.

        Raises
        ------
        NotLoweredError
            When `can_generate` would refuse the calls.
        """
        source = self.source(calls, {spec.buffer for spec in group.outputs})
        log.debug("%s: %s\n%s", group.name, group.signature, source.text)
        return KernelDescriptor(
            signature=group.signature,
            name=source.name,
            source=source.text,
            origin="generated",
            fuses=tuple(call.signature for call in calls) if len(calls) > 1 else (),
            packed=tuple(packed(arg) for arg in source.args),
        )

    def source(self, calls: Sequence[OpCall], stored: Collection[int]) -> KernelSource:
        """Return the kernel's text and parameters.

        Parameters
        ----------
        calls
            In order.
        stored
            Buffers of the results that it writes.
        """
        if self._generic is not None and self._takes_generic(calls):
            made = self._generic.source(calls, stored, self.language)
        else:
            lowering, nest = self._lowering(calls, stored)
            made = self._write_loops(merge_axes(nest, lowering.expressions), self.language, "KERNEL")
        return _named(made, calls)

    def _refusal(self, calls: Sequence[OpCall], inner: Collection[int]) -> str | None:
        if self._takes_generic(calls):
            return None
        try:
            self._lowering(calls, {spec.buffer for call in calls for spec in call.outputs if spec.buffer not in inner})
        except NotLoweredError as error:
            return str(error)
        return None

    def _takes_generic(self, calls: Sequence[OpCall]) -> bool:
        if self._generic is None or self._generic.refusal(calls) is not None:
            return False
        return len(calls) == 1 or self._fuses_generic

    def _lowering(self, calls: Sequence[OpCall], stored: Collection[int]) -> tuple[Lowering, LoopNest]:
        lowering = Lowering(calls, self._rules, stored, self._round_halves)
        return lowering, lowering.run()


def _named(made: KernelSource, calls: Sequence[OpCall]) -> KernelSource:
    """Give a kernel a name that says what it computes, and that no other text has."""
    short = "_".join(re.sub(r"\W", "_", call.signature.partition("::")[2].partition(".")[0]) for call in calls)
    digest = hashlib.sha256(made.text.encode()).hexdigest()[:10]
    name = f"{short[:NAME_LENGTH].strip('_')}_{digest}"
    lines = [_comment(call) for call in calls]
    text = "\n".join([*dict.fromkeys(lines), made.text.replace("KERNEL", name, 1)])
    return KernelSource(name, text, made.args, made.reports, made.items)


def _comment(call: OpCall) -> str:
    line = call.provenance.line
    return f"/* {call.signature}" + (f"  <- {line.replace('*/', '* /')}" if line else "") + " */"


def packed(arg: KernelArg) -> PackedArg:
    """Return a generated kernel's parameter as the extractor packs parameters."""
    if isinstance(arg.value, TensorSpec):
        return PackedArg(arg.name, arg.value, arg.access, type=arg.type)
    return PackedArg(arg.name, arg.value, type="int64_t", data=struct.pack("<q", arg.value))
