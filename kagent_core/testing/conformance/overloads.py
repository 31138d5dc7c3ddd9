"""Level 2, its other part: core ATen's overloads, each called by itself, give what eager PyTorch gives.

The operator database calls functions, of which capture makes other overloads. What these do not reach, a program that
calls ATen itself does, and graphs that were exported.
"""

from __future__ import annotations

import functools

import torch

from kagent_core.capture.schemas import resolve_overload
from kagent_core.single import run_overload
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance.case import Case, Ran, Target
from kagent_core.testing.conformance.database import copied
from kagent_core.testing.conformance.reproduction import script_head
from kagent_core.testing.conformance.running import OnDevice, assert_right, widened
from kagent_core.testing.core_calls import Arguments, core_calls

LEVEL = 2
FAMILY = "core ATen, called by itself"
CALLS = 2
"""The first call builds a plan, the second replays it."""

_SCRIPT = """
signature = {signature!r}
arguments = core_calls()[signature]
with torch.no_grad():
    want = resolve_overload(signature)(*arguments)
    for _ in range(2):  # the first call builds a plan, the second replays it
        got = kagent_core.run_op(signature, *arguments, device=DEVICE)
        assert_same(got, want, signature, every_stride={every_stride})
"""


def overload_cases() -> list[Case]:
    """Return a case for each of core ATen's overloads that kagent generates kernels for."""
    return [
        Case(LEVEL, name, FAMILY, functools.partial(_check, name, given), functools.partial(_script, name))
        for name, given in core_calls().items()
    ]


def _check(signature: str, given: Arguments, target: Target) -> Ran:
    device, overload = OnDevice(target), resolve_overload(signature)
    with device.watched(), torch.no_grad():
        want = overload(*given)
        for number in range(CALLS):
            ours = copied(given)
            got = run_overload(device.session, overload, ours, {})
            assert_same(ours, given, f"arguments after call {number}")
            assert_right(
                got,
                want,
                f"result of call {number}",
                lambda: overload(*widened(given)),
                every_stride=device.host_memory,
            )
        return Ran(device.fallbacks())


def _script(signature: str, target: Target) -> str:
    imports = {
        "kagent_core.capture.schemas": ["resolve_overload"],
        "kagent_core.testing.compare": ["assert_same"],
        "kagent_core.testing.core_calls": ["core_calls"],
    }
    head = script_head(signature, target, imports, ["kagent_core"])
    return head + "\n" + _SCRIPT.format(signature=signature, every_stride=OnDevice(target).host_memory)
