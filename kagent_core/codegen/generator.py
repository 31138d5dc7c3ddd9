"""The core's code generator: from a group of operators to a kernel in a C-family language."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

from kagent_core.codegen.c_family import SHORT, CFamily
from kagent_core.codegen.generic import GenericKernels
from kagent_core.codegen.generic.leading import with_what_is_read
from kagent_core.codegen.kernel import KernelArg, KernelSource, LoopNest
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.merging import merge_axes
from kagent_core.codegen.pattern import Numbers, Pattern, pattern_of, with_buffers
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.table import LoweringKind, NotLoweredError, RuleTable
from kagent_core.codegen.writer import WideIndexError
from kagent_core.errors import LaunchConfigError
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import KernelDescriptor, OpCall, PackedArg, SizeNumber, TensorSpec
from kagent_core.specs.tiles import TileChoice, Tiles, spelled_tiles

log = get_logger("codegen")

WriteLoops = Callable[[LoopNest, CFamily, str], KernelSource]
"""Writes a loop nest in a device's language."""

ChooseTiles = Callable[[Sequence[OpCall]], TileChoice]
"""Given some calls, the tile sizes of their kernel: what the device's own are replaced with."""

REMEMBERED = 2048
"""Kernels that are remembered by their pattern."""

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
    library_is_better
        Given a call, whether what the registry resolves is faster than loops for the call alone.
    generic_is_better
        Given a call, whether a parametrised kernel is better than what the registry resolves, so that it outranks that,
        and pointwise operators are computed where it stores its result.
    preamble
        What each kernel's source begins with, for a device that loads every kernel by itself.
    leaves_size_numbers
        Whether pointwise operators are left to the registry whose number follows from sizes of the inputs. It would
        stand in the text, and the text would be compiled again for each.
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
        library_is_better: Callable[[OpCall], bool] = lambda call: False,
        generic_is_better: Callable[[OpCall], bool] = lambda call: False,
        preamble: str = "",
        leaves_size_numbers: bool = False,
    ) -> None:
        self.language = language
        self._write_loops = write_loops
        self._round_halves = round_halves
        self._rules = rules
        self._generic = generic
        self._fuses_generic = fuses_generic
        self._prefers_all = prefers_all
        self._library_is_better = library_is_better
        self._generic_is_better = generic_is_better
        self._preamble = preamble
        self._leaves_size_numbers = leaves_size_numbers
        self._choose_tiles: ChooseTiles = lambda calls: TileChoice()
        self._languages = (language.narrowed(), language) if language.narrow_indices else (language,)
        self._known: OrderedDict[tuple[Pattern, Tiles], tuple[KernelSource, Numbers]] = OrderedDict()
        self._lock = threading.Lock()

    def with_tiles(self, choose: ChooseTiles) -> Self:
        """Return the same generator with tile sizes that something else chooses; the two remember kernels together."""
        other = copy.copy(self)
        other._choose_tiles = choose
        return other

    def has_tiles(self, calls: Sequence[OpCall]) -> bool:
        """Return whether a kernel for some calls is one with tile sizes."""
        return self._has_generic(with_what_is_read(calls)[0])

    def can_generate(self, calls: Sequence[OpCall], inner: Collection[int] = ()) -> str | None:
        """Return why no kernel can be made of some calls, or None when one can."""
        if self._leaves_size_numbers:
            told = next(filter(None, map(self._size_number, calls)), None)
            if told is not None:
                return told
        stored = frozenset(spec.buffer for call in calls for spec in call.outputs if spec.buffer not in inner)
        made = self._make(calls, stored)
        return made if isinstance(made, str) else None

    def prefers(self, call: OpCall) -> bool:
        """Return whether a kernel made for one call outranks what the registry's resolver finds."""
        # written arguments may overlap others in ways that only running tells: a library's kernel checks that
        if len(call.fresh_results) < len(call.outputs):
            return False
        if self._prefers_all:
            return True
        if self._generic_is_better(call):
            return self.can_generate([call]) is None
        if self._leaves_size_numbers and self._size_number(call) is not None:
            return False
        return call.signature in self._rules and not self._library_is_better(call) and self._is_lowered(call)

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
            source=self._preamble + source.text,
            origin="generated",
            fuses=tuple(call.signature for call in calls) if len(calls) > 1 else (),
            packed=tuple(packed(arg) for arg in source.args),
            items=source.items,
            reports=source.reports,
            threads=source.threads,
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
        made = self._make(calls, stored)
        if isinstance(made, str):
            raise NotLoweredError(made)
        return _commented(made, calls)

    def _size_number(self, call: OpCall) -> str | None:
        """Return why a call is not generated whose text has a number in it that follows from sizes, or None."""
        rule = self._rules.find(call.signature)
        if rule is None or rule.kind is not LoweringKind.POINTWISE:
            return None
        found = (value for value in call.arguments.values() if isinstance(value, SizeNumber))
        number = next(found, None)
        return None if number is None else f"{call.name} has a number, {number}, that is another one with other sizes"

    def _is_lowered(self, call: OpCall) -> bool:
        """Whether a kernel for one call is loops around an expression rather than a parametrised one."""
        made = self._make([call], {spec.buffer for spec in call.outputs})
        return not isinstance(made, str) and made.lowered

    def _make(self, calls: Sequence[OpCall], stored: Collection[int]) -> KernelSource | str:
        """Return the kernel for some calls, or why there is none. A pattern that is known is not lowered again."""
        pattern, numbers = pattern_of(calls, stored)
        tiled = self.has_tiles(calls)
        choice = self._choose_tiles(calls) if tiled else TileChoice()
        key = (pattern, choice.tiles)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None:
            return with_buffers(known[0], known[1], numbers)
        try:
            made = self._checked(self._written(calls, stored, choice), calls)
            made = _named(replace(made, text=self.language.finished(made.text)), calls)
        except NotLoweredError as error:
            return str(error)
        except LaunchConfigError as error:
            if choice.tiles:  # of which somebody must hear who asked for them
                raise
            return error.message
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            names = "+".join(call.signature for call in calls)
            log.warning("a lowering rule of %s has a bug; no kernel is generated for it", names, exc_info=error)
            return f"{type(error).__name__} in lowering {names}: {error}"
        with self._lock:
            self._known[key] = (made, numbers)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return made

    def _written(self, calls: Sequence[OpCall], stored: Collection[int], choice: TileChoice) -> KernelSource:
        """Return a kernel: loops around expressions where there are rules, and else a parametrised one."""
        if self._makes_nothing(calls):
            return KernelSource("KERNEL_NAME", f"{self.language.head('KERNEL_NAME', (), False)} {{\n}}\n", (), items=0)
        try:
            one_pass, wide = self.language.one_pass, self.language.wide
            lowering = Lowering(calls, self._rules, stored, self._round_halves, one_pass=one_pass, wide=wide)
            nest = merge_axes(lowering.run(), lowering.expressions)
        except NotLoweredError:
            if self._generic is None or not self._takes_generic(calls):
                raise
            return self._tiled(self._generic, calls, stored, choice)
        made = self._in_narrowest(lambda language: self._write_loops(nest, language, "KERNEL_NAME"))
        return replace(made, lowered=True)

    def _checked(self, made: KernelSource, calls: Sequence[OpCall]) -> KernelSource:
        """Return a kernel that computes in no type that the device lacks, and has no tensor of one.

        Raises
        ------
        NotLoweredError
            With the reason.
        """
        for dtype, reason in self.language.lacks.items():
            tensors = [spec for call in calls for spec in (*call.inputs, *call.outputs)]
            if any(spec.dtype.name == dtype for spec in tensors):
                raise NotLoweredError(reason)
            if re.search(rf"(?<![A-Za-z0-9]){SHORT[dtype]}(?!\d)", made.text):
                signatures = "+".join(call.signature for call in calls)
                raise NotLoweredError(f"{signatures} computes in {dtype} inside, and {reason}")
        return made

    def _makes_nothing(self, calls: Sequence[OpCall]) -> bool:
        """Whether no result has elements: then there is nothing to compute, whatever the operators are."""
        known = all(call.signature in self._rules or self._has_generic(call) for call in calls)
        return known and all(spec.numel == 0 for call in calls for spec in call.outputs)

    def _has_generic(self, call: OpCall) -> bool:
        return self._generic is not None and call.signature in self._generic

    def _tiled(
        self, generic: GenericKernels, calls: Sequence[OpCall], stored: Collection[int], choice: TileChoice
    ) -> KernelSource:
        """Return a parametrised kernel. Tuned tile sizes that take too much memory are told, and not used."""
        try:
            return self._in_narrowest(lambda language: generic.source(calls, stored, language, choice.tiles))
        except LaunchConfigError as error:
            if choice.source != "suggested":
                raise
            told = "%s: the tile sizes that were tuned for %s, %s, are not used: %s"
            signature = "+".join(call.signature for call in calls)
            log.warning(told, calls[-1].name, signature, spelled_tiles(choice.tiles), error.message)
            return self._in_narrowest(lambda language: generic.source(calls, stored, language))

    def _in_narrowest(self, write: Callable[[CFamily], KernelSource]) -> KernelSource:
        """Return a kernel with the narrowest indices that the language wants and that everything fits into."""
        for language in self._languages[:-1]:
            with contextlib.suppress(WideIndexError):
                return write(language)
        return write(self._languages[-1])

    def _takes_generic(self, calls: Sequence[OpCall]) -> bool:
        if self._generic is None:
            return False
        first = with_what_is_read(calls)[0]
        if first.signature not in self._generic:
            return False
        fuses = len(calls) == 1 or self._fuses_generic or self._generic_is_better(first)
        return fuses and self._generic.refusal(calls) is None


def _named(made: KernelSource, calls: Sequence[OpCall]) -> KernelSource:
    """Give a kernel a name that says what it computes, and that no other text has."""
    short = "_".join(re.sub(r"\W|^_+", "", call.signature.partition("::")[2].partition(".")[0]) for call in calls)
    digest = hashlib.sha256(made.text.encode()).hexdigest()[:10]
    name = f"{short[:NAME_LENGTH].strip('_')}_{digest}"
    return replace(made, name=name, text=made.text.replace("KERNEL_NAME", name, 1))


def _commented(made: KernelSource, calls: Sequence[OpCall]) -> KernelSource:
    """Say above a kernel what it computes and where in the user's program that is."""
    lines = dict.fromkeys(_comment(call) for call in calls)
    return replace(made, text="\n".join([*lines, made.text]))


def _comment(call: OpCall) -> str:
    line = call.provenance.line
    return f"/* {call.signature}" + (f"  <- {line.replace('*/', '* /')}" if line else "") + " */"


def packed(arg: KernelArg) -> PackedArg:
    """Return a generated kernel's parameter as the extractor packs parameters."""
    if isinstance(arg.value, TensorSpec):
        return PackedArg(arg.name, arg.value, arg.access, type=arg.type)
    return PackedArg(arg.name, arg.value, type="int64_t", data=struct.pack("<q", arg.value))
