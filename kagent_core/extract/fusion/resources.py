"""What a fused kernel is estimated to need, held against what the device has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kagent_core.extract.fusion.operator_class import OperatorClass, class_of
from kagent_core.specs import DeviceInfo, OpCall, TensorSpec

MOST_OPERATORS = 64
"""That one kernel computes: beyond, compiling it takes longer than it saves."""

POINTER_REGISTERS = 2
"""32-bit registers that hold an address, or a 64-bit scalar."""

INDEX_REGISTERS = 16
"""For the loop's counters and bounds, and what the compiler needs in between."""

REDUCTION_THREADS = 256
"""Threads of a block that reduces; each keeps its partial results in shared memory."""

PARTIAL_NBYTES = 8
"""Size of a partial result: long sums go on in float64, and places are int64."""

PARAMETRISED_REGISTERS = 128
"""For the sums and addresses of a parametrised kernel, whatever its tiles are."""

_VARIANCES = frozenset(
    {
        *("var", "var_mean", "std", "std_mean", "native_layer_norm", "native_group_norm", "_native_batch_norm_legit"),
        *("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional"),
    }
)
"""Operators whose partial results are a count, a mean and a sum of squares."""

_PLACES = frozenset({"aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim"})
"""Operators whose partial results are a value and its place."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one kernel needs.

    Attributes
    ----------
    parameters
        Pointers and scalars that it is given.
    registers
        32-bit registers of a thread, at the point where the most values are alive.
    shared_nbytes
        Shared memory of a block, in bytes.
    """

    parameters: int
    registers: int
    shared_nbytes: int

    def beyond(self, info: DeviceInfo) -> str | None:
        """Return which limit of a device it exceeds, with numbers, or None. A limit that is 0 is not known."""
        for what, needed, limit in (
            ("parameters", self.parameters, info.max_parameters),
            ("registers", self.registers, info.max_registers),
            ("bytes of shared memory", self.shared_nbytes, info.shared_nbytes),
        ):
            if limit and needed > limit:
                return f"one kernel would need {needed} {what}, {info.device} has {limit}"
        return None


def estimate(calls: Sequence[OpCall], inner: Collection[int], info: DeviceInfo) -> Estimate:
    """Estimate what one kernel for some calls needs.

    Parameters
    ----------
    calls
        In order.
    inner
        Buffers of results that stay inside the kernel.
    info
        The device, for the number of threads that a block can have.
    """
    made = {spec for call in calls for spec in call.outputs}
    outside = {spec for call in calls for spec in call.inputs if spec not in made and spec.buffer not in inner}
    results = {spec for spec in made if spec.buffer not in inner}
    scalars = sum(isinstance(value, (int, float, complex)) for call in calls for value in call.arguments.values())
    pointers = len(outside) + len(results)
    parametrised = any(class_of(call) in (OperatorClass.PARAMETRISED, OperatorClass.OTHER) for call in calls)
    registers = INDEX_REGISTERS + POINTER_REGISTERS * (pointers + scalars) + _most_alive(calls)
    shared = sum(_shared_nbytes(call, info) for call in calls)  # reductions of one pass have their places side by side
    return Estimate(
        parameters=pointers + scalars,
        registers=registers + (PARAMETRISED_REGISTERS if parametrised else 0),
        shared_nbytes=max(shared, info.shared_nbytes) if parametrised else shared,  # tiles are made to fit
    )


def _most_alive(calls: Sequence[OpCall]) -> int:
    """Registers of the values that are alive at the same time, at most."""
    last_use = {spec.buffer: position for position, call in enumerate(calls) for spec in call.inputs}
    alive: dict[int, int] = {}
    most = 0
    for position, call in enumerate(calls):
        alive.update((spec.buffer, _registers(spec)) for spec in (*call.inputs, *call.outputs))
        most = max(most, sum(alive.values()))
        for spec in (*call.inputs, *call.outputs):
            if last_use.get(spec.buffer, position) <= position:
                alive.pop(spec.buffer, None)
    return most


def _registers(spec: TensorSpec) -> int:
    return -(-spec.dtype.itemsize // 4)


def _shared_nbytes(call: OpCall, info: DeviceInfo) -> int:
    if class_of(call) not in (OperatorClass.REDUCTION, OperatorClass.ROWS):
        return 0
    name = call.signature.partition("::")[2].partition(".")[0]
    partials = 3 if name in _VARIANCES else 2 if call.signature in _PLACES else 1
    return min(REDUCTION_THREADS, info.max_threads_per_block) * partials * PARTIAL_NBYTES
