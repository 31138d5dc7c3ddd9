"""The error of a missing kernel: what came, what there is, and a kernel to begin with."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Callable, Iterable, Sequence

from kagent_core.errors import KernelNotFoundError
from kagent_core.registry.acceptance import NamedTensor, named_tensors, result_names
from kagent_core.specs import OpCall, TensorSpec, flatten_tensors, format_value

MOST_NEAREST = 3


def kernel_not_found(
    call: OpCall,
    device_type: str,
    signatures: Sequence[str],
    refused: Sequence[str],
    stub: Callable[[OpCall], str] | None = None,
) -> KernelNotFoundError:
    """Return the error for a call that no kernel takes.

    Parameters
    ----------
    call
        What came.
    device_type
        Of the registry.
    signatures
        Those that are registered.
    refused
        Of each kernel that was close, its name and why it does not take the call.
    stub
        Writes a kernel for the call; `kernel_stub` by default.
    """
    close = [] if refused else nearest_signatures(call.signature, signatures)
    message = f"no kernel for {call.signature} on '{device_type}' takes what came: {_what_came(call)}"
    if refused:
        message += f"; {'; '.join(refused)}"
    elif close and _operator(close[0]) == _operator(call.signature):
        there = " and ".join(close)
        message += f"; {call.signature} is missing, {there} {'is' if len(close) == 1 else 'are'} there"
    hint = ""
    if close:
        named = ", ".join(f"'{signature}'" for signature in close)
        hint = f"the nearest registered signature{' is' if len(close) == 1 else 's are'} {named}; "
    hint += 'register a kernel for it, or set missing_kernel = "fallback". '
    written = kernel_stub(call, device_type) if stub is None else stub(call)
    return KernelNotFoundError(message, hint=f"{hint}A kernel to begin with:\n\n{written}")


def nearest_signatures(signature: str, known: Iterable[str]) -> list[str]:
    """Return the other overloads of the operator, or else the signatures whose names are spelled most alike.

    Examples
    --------
    >>> nearest_signatures("aten::add.Tensor", ["aten::add.Scalar", "aten::addmm", "aten::relu"])
    ['aten::add.Scalar']
    >>> nearest_signatures("aten::addm", ["aten::add.Scalar", "aten::addmm", "aten::relu"])
    ['aten::addmm', 'aten::add.Scalar']
    """
    singles = sorted(other for other in known if "+" not in other)
    overloads = [other for other in singles if _operator(other) == _operator(signature)]
    if overloads:
        return overloads
    names = {other: _operator(other).rpartition("::")[2] for other in singles}
    wanted = _operator(signature).rpartition("::")[2]
    close = difflib.get_close_matches(wanted, sorted(set(names.values())), n=MOST_NEAREST, cutoff=0.6)
    return [other for name in close for other in singles if names[other] == name][:MOST_NEAREST]


def kernel_stub(call: OpCall, device_type: str) -> str:
    """Return Python text that registers a kernel for a call: all but the line that computes it.

    The kernel takes the arguments that the call gave, in order, then the results that it fills, then by name what the
    operator takes by name.

    Examples
    --------
    >>> from kagent_core.specs import DType, TensorSpec
    >>> x = TensorSpec(DType("float32", 4), (2, 3), (3, 1), storage_offset=0, buffer=0)
    >>> y = TensorSpec(DType("float32", 4), (2, 3), (3, 1), storage_offset=0, buffer=1)
    >>> print(kernel_stub(OpCall(0, "neg", "aten::neg", {"self": x}, (x,), (y,), (y,)), "toy"))
    import kagent_core
    <BLANKLINE>
    <BLANKLINE>
    @kagent_core.kernel("aten::neg", device="toy", dtypes={"float32"})
    def my_neg(self, out):
        # self: f32[2, 3] strides (3, 1); out: f32[2, 3] strides (3, 1)
        raise NotImplementedError("write aten::neg into out")
    """
    results = result_names(call)
    dtypes = sorted({spec.dtype.name for spec in (*call.inputs, *call.outputs)})
    selected = f", dtypes={{{', '.join(map(_quoted, dtypes))}}}" if dtypes else ""
    by_name = _taken_by_name(call)
    by_place = [_identifier(name) for name in call.arguments if name not in by_name]
    parameters = [*by_place, *results, *(["*"] if by_name else []), *map(_identifier, by_name)]
    specs = zip(results, call.fresh_results, strict=True)
    told = [f"{_identifier(name)}: {_argument(value)}" for name, value in (*call.arguments.items(), *specs)]
    targets = results or [_identifier(name) for name in _written(call)]
    into = f" into {' and '.join(targets)}" if targets else ""
    return "\n".join(
        [
            "import kagent_core",
            "",
            "",
            f'@kagent_core.kernel("{call.signature}", device="{device_type}"{selected})',
            f"def {_function_name(call.signature)}({', '.join(parameters)}):",
            f"    # {'; '.join(told) or 'no arguments'}",
            f'    raise NotImplementedError("write {call.signature}{into}")',
        ]
    )


def _taken_by_name(call: OpCall) -> list[str]:
    """Arguments that come by name: those that the operator takes so, and those behind one that was left out."""
    found: list[str] = []
    left_out = False
    for argument in call.overload._schema.arguments if call.overload is not None else ():
        if argument.name in call.arguments:
            if argument.kwarg_only or left_out:
                found.append(argument.name)
        else:
            left_out = True
    return found


def _what_came(call: OpCall) -> str:
    tensors = list(named_tensors(call))
    if not tensors:
        return "no tensors"
    return ", ".join(_described(tensor) for tensor in tensors)


def _described(tensor: NamedTensor) -> str:
    name, spec = tensor
    return f"{_tensor(spec)} as {name}"


def _tensor(spec: TensorSpec) -> str:
    return f"{spec} strides {spec.strides}"


def _argument(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_argument(item) for item in value)}]"
    return _tensor(value) if isinstance(value, TensorSpec) else format_value(value)


def _written(call: OpCall) -> list[str]:
    """Names of the arguments that a call writes in place."""
    return [
        name
        for name, value in call.arguments.items()
        if any(spec is written for spec in flatten_tensors(value) for written in call.outputs)
    ]


def _operator(signature: str) -> str:
    return signature.partition(".")[0]


def _function_name(signature: str) -> str:
    return "my_" + signature.rpartition("::")[2].replace(".", "_").strip("_")


def _identifier(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name


def _quoted(word: str) -> str:
    return f'"{word}"'
