"""Scripts that reproduce what a case found, with nothing but torch and kagent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kagent_core.specs import Device
from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.database import EXCEPTIONS, NOT_CAPTURED, full_name, samples
from kagent_core.testing.conformance.literals import UnspellableError, literal, wrapped

COMPILED = 'torch.compile(function, backend="kagent", options={"device": DEVICE})'
ONE_BY_ONE = "OnDevice(Target(DEVICE)).one_by_one(function)  # torch.compile does not capture it"

_RUN = """
def run(function, sample):
    torch.manual_seed(1)
    result = function(*sample)
    return result, torch.get_rng_state()
"""

_COMPARE = """
torch._dynamo.config.capture_scalar_outputs = True
torch._dynamo.config.capture_dynamic_output_shape_ops = True
through_kagent = {through}
for _ in range(2):  # the first call builds a plan, the second replays it
    ours, theirs = copied(given), copied(given)
    want, state = run(function, theirs)
    got, ours_state = run(through_kagent, ours)
    assert torch.equal(ours_state, state), "kagent drew other random numbers"
    assert_same(dense(ours), dense(theirs), "arguments afterwards", every_stride={every_stride})
    {compare}
"""

_SAME = 'assert_same(dense(got), dense(want), "result", every_stride={every_stride})'
_SAME_GEOMETRY = "assert geometry(got, {every_stride}) == geometry(want, {every_stride})  # the values are anyone's"


def operator_script(
    entry: Any, dtype: torch.dtype, position: int, gradients: bool, target: Target, every_stride: bool
) -> str:
    """Return a script that runs one sample of an entry on a device and in eager PyTorch, and compares them.

    Small arguments are written out, with their strides; others are made by torch's operator database.

    Parameters
    ----------
    entry
        Of the database.
    dtype, position, gradients
        Which of the entry's samples, and whether the gradients of the arguments are compared.
    target
        The device.
    every_stride
        Whether all strides are compared.
    """
    name, operator = full_name(entry), _spelled_operator(entry)
    given = None if gradients else _spelled_sample(entry, dtype, position)
    imports = {
        "kagent_core.testing.compare": ["assert_same"],
        "kagent_core.testing.conformance.database": ["copied", "dense"],
    }
    lines: list[str] = []
    if operator is None or given is None:
        imports["torch.testing._internal"] = ["common_methods_invocations"]
        lines += _entry_lines(entry)
    if given is None:
        imports["kagent_core.testing.conformance.database"].append("samples")
        lines.append(f"sample = samples(entry, {dtype}, {position + 1}, requires_grad={gradients})[{position}]")
        given = "(sample.input, sample.args, sample.kwargs)"
    lines += [
        "",
        "",
        "def function(first, args, kwargs):",
        f"    return {operator or 'entry.op'}(first, *args, **kwargs)",
    ]
    if gradients:
        imports["kagent_core.testing.conformance.operators"] = ["seeded_with_gradients"]
        run = f"\nrun = functools.partial(seeded_with_gradients, {name!r}, sample.output_process_fn_grad)"
    else:
        run = f"\n{_RUN}\n"
    if name in EXCEPTIONS:
        imports["kagent_core.testing.conformance.operators"] = ["geometry"]
    if name in NOT_CAPTURED:
        imports["kagent_core.testing.conformance.case"] = ["Target"]
        imports["kagent_core.testing.conformance.running"] = ["OnDevice"]
    told = f"{name}, sample {position} of {str(dtype).removeprefix('torch.')}{', with gradients' if gradients else ''}"
    compare = _COMPARE.format(
        through=ONE_BY_ONE if name in NOT_CAPTURED else COMPILED,
        compare=(_SAME_GEOMETRY if name in EXCEPTIONS else _SAME).format(every_stride=every_stride),
        every_stride=every_stride,
    )
    head = script_head(told, target, imports, ["functools"] if gradients else [])
    return "\n".join([head, *lines, run, wrapped(f"given = {given}"), compare.lstrip("\n")])


def script_head(told: str, target: Target, imports: dict[str, list[str]], modules: Sequence[str] = ()) -> str:
    """Return a script's first lines: what it is about, its imports and its device.

    Parameters
    ----------
    told
        What it is about.
    target
        The device. The fake one is registered by the script itself.
    imports
        Names by module.
    modules
        Of the standard library, imported whole.
    """
    fake = Device.parse(target.device).type == "fake"
    if fake:
        imports = imports | {"kagent_core": ["use_plugin"], "kagent_core.testing": ["FakeDevice"]}
    lines = [f'"""{told}: on {target.device} against eager PyTorch."""', ""]
    lines += [*(f"import {module}" for module in sorted(modules)), *([""] if modules else []), "import torch", ""]
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    lines += ["", f'DEVICE = "{target.device}"']
    if fake:
        lines += ["registration = use_plugin(FakeDevice())", "registration.__enter__()  # for as long as it runs"]
    return "\n".join(lines)


def _spelled_operator(entry: Any) -> str | None:
    """Return how a program calls an entry's operator, such as ``torch.nn.functional.relu``; None if it cannot."""
    found: Any = torch
    for part in entry.name.split("."):
        found = getattr(found, part, None)
    return f"torch.{entry.name}" if found is not None and found is entry.op else None


def _spelled_sample(entry: Any, dtype: torch.dtype, position: int) -> str | None:
    sample = samples(entry, dtype, position + 1)[position]
    try:
        return literal((sample.input, sample.args, sample.kwargs))
    except UnspellableError:
        return None


def _entry_lines(entry: Any) -> list[str]:
    key = (entry.name, entry.variant_test_name)
    return [
        "",
        "# Dynamo does not enter what seeds the generator",
        "common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)",
        "database = common_methods_invocations.op_db",
        f"entry = next(entry for entry in database if (entry.name, entry.variant_test_name) == {key!r})",
    ]
