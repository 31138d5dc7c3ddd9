"""What a program needs of a device: its operators, captured as kagent captures them and run by PyTorch itself."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

from kagent_core.backend import decompositions
from kagent_core.capture.graph import CapturedGraph, why_not_a_program
from kagent_core.capture.schemas import is_operator, signature_of
from kagent_core.device import OpenDevice
from kagent_core.errors import KagentError, nearest
from kagent_core.specs import OpCall


@dataclass(frozen=True)
class Missing:
    """An operator that a device has no kernel for.

    Attributes
    ----------
    signature
        The exact overload.
    count
        How often the program calls it with what the device does not take.
    example
        Tensors of the first such call.
    reasons
        Why the kernels for this signature do not take them.
    """

    signature: str
    count: int
    example: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """How many operators a program calls, how many different ones, and those that are missing."""

    calls: int
    signatures: int
    missing: tuple[Missing, ...]


def needs_of(program: str, opened: OpenDevice, train: bool = False) -> Needs:
    """Run a program once and return what of it a device has no kernel for, and can make none, most frequent first.

    Parameters
    ----------
    program
        ``MODEL.py`` or ``MODEL.py:FUNCTION``.
    opened
        The device.
    train
        Whether to run the backward pass, too.

    Raises
    ------
    KagentError
        When the file cannot be read, or does not define what it should.
    """
    model, inputs = load_program(program)
    calls = captured_calls(model, inputs, train)
    lacking = [call for call in calls if not opened.has_kernel(call)]
    firsts = {call.signature: call for call in reversed(lacking)}
    counts = Counter(call.signature for call in lacking)
    missing = tuple(
        Missing(signature, count, _example(firsts[signature]), tuple(opened.registry.refusals(firsts[signature])))
        for signature, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    return Needs(len(calls), len({call.signature for call in calls}), missing)


def known_operators(core_only: bool) -> Iterator[OpCall]:
    """Yield a call, without arguments, of every operator that writes none of its arguments, by name."""
    for signature in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = signature.partition("::")
        name, _, overload_name = rest.partition(".")
        overload = getattr(getattr(getattr(torch.ops, namespace), name, None), overload_name or "default", None)
        if overload is None or overload._schema.is_mutable:
            continue
        if not core_only or (namespace == "aten" and torch.Tag.core in overload.tags):
            yield _bare_call(overload)


# -- the program


def load_program(program: str) -> tuple[Callable[..., Any], Any]:
    """Return the model and the inputs that a file defines, or that a function of it returns."""
    path, function = _split(program)
    module = load_module(path)
    if function is None:
        return _defined(module, path, "model"), _defined(module, path, "inputs")
    given = _defined(module, path, function)()
    if not isinstance(given, tuple) or len(given) != 2:
        raise KagentError(f"{function}() of '{path}' returned a {type(given).__name__}, expected (model, inputs)")
    return given


def _split(program: str) -> tuple[Path, str | None]:
    path, colon, function = program.rpartition(":")
    if colon and function.isidentifier():
        return Path(path), function
    return Path(program), None


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module of its name, with its directory first on the path, and return the module."""
    if not path.is_file():
        raise KagentError(f"there is no file '{path}'")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise KagentError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.path[0]
    return module


def _defined(module: ModuleType, path: Path, name: str) -> Any:
    if not hasattr(module, name):
        names = [other for other in vars(module) if not other.startswith("_")]
        close = nearest(name, names)
        raise KagentError(
            f"'{path}' does not define '{name}'",
            hint=f"did you mean '{close}'?"
            if close
            else "define `model` and `inputs`, or name a function that returns the two: FILE.py:FUNCTION",
        )
    return getattr(module, name)


# -- its operators


def captured_calls(model: Callable[..., Any], inputs: Any, train: bool) -> list[OpCall]:
    """Run a program once, on the CPU and in PyTorch itself, and return the operators that kagent would run."""
    found: list[OpCall] = []

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        graph = None if why_not_a_program(graph_module) else CapturedGraph(graph_module, "program")

        def run(args: list[Any]) -> Any:
            if graph is None:
                return _Noting(graph_module, found).run(*args)
            found.extend(graph.program(args).calls)
            return graph_module(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )(graph_module, example_inputs)
        return compiled

    args, kwargs = program_arguments(inputs)
    with torch.set_grad_enabled(train):
        outputs = torch.compile(model, backend=backend)(*args, **kwargs)
        if train:
            _backward(outputs)
    return found


class _Noting(Interpreter):
    """Runs a graph that has no plan, and notes its operators without their tensors."""

    def __init__(self, graph_module: GraphModule, found: list[OpCall]) -> None:
        super().__init__(graph_module)
        self._found = found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_operator(target) and _runs_somewhere(target, args):
            self._found.append(_bare_call(target))
        return super().call_function(target, args, kwargs)


def _runs_somewhere(overload: Any, args: Any) -> bool:
    """Whether a device runs an operator, other than a view, a question for a size, or arithmetic on sizes."""
    returns = overload._schema.returns
    given = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))
    makes = not returns or any("Tensor" in str(result.type) for result in returns)
    return given and makes and not overload.is_view


def _bare_call(overload: Any) -> OpCall:
    return OpCall(0, overload.__name__, signature_of(overload), {}, (), (), (), overload=overload)


def program_arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return what a program is called with: a mapping by name, anything else by place."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _backward(outputs: Any) -> None:
    """Take the sum of everything that has a gradient for the loss."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise KagentError("nothing that the program returns has a gradient", hint="leave --train out")
    torch.autograd.backward([leaf.sum() for leaf in leaves])


def _example(call: OpCall) -> str:
    return ", ".join(map(str, call.inputs))
