"""A captured graph, and the programs that it becomes for concrete shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kagent_core.capture.random import MISTAKEN_ALIASES
from kagent_core.capture.schemas import OperatorSchema, dtype_of, is_operator, schema_of
from kagent_core.capture.symbols import SymbolValues
from kagent_core.errors import CaptureError
from kagent_core.specs import (
    BufferKind,
    BufferSpec,
    InputRef,
    OpCall,
    OutputRef,
    Program,
    Provenance,
    SizeNumber,
    TensorSpec,
    flatten_tensors,
)


def input_spec(tensor: torch.Tensor, buffer: int, whole_storage: bool) -> TensorSpec:
    """Describe an input. Its buffer begins at its first element, or with its storage if `whole_storage`."""
    return TensorSpec(
        dtype=dtype_of(tensor.dtype),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        storage_offset=int(tensor.storage_offset()) if whole_storage else 0,
        buffer=buffer,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )


def why_not_a_program(graph_module: GraphModule) -> str | None:
    """Return why a graph cannot be planned ahead, or None when it can.

    Such a graph runs operator by operator: sizes that only running tells, operators that call graphs.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            return f"it calls the module '{node.target}'"
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it has the higher-order operator {node.target}, whose own graph runs in PyTorch itself"
        if node.meta.get("unbacked_bindings"):
            return f"the size of what {node.target} returns depends on data"
        value = node.meta.get("val")
        for tensor in _tensors(value):
            if tensor.layout is not torch.strided:
                return f"{node.target} returns a tensor of layout {tensor.layout}"
        if is_operator(node.target) and value is None and node.target._schema.returns:
            return f"what {node.target} returns is not known before it runs"
    return None


class CapturedGraph:
    """An fx graph of ATen operators whose nodes carry fake tensors, as AOTAutograd makes it.

    Parameters
    ----------
    graph_module
        Functional except for ``copy_`` into its inputs.
    name
        For logs and dumps.
    """

    def __init__(self, graph_module: GraphModule, name: str) -> None:
        self.graph_module = graph_module
        self.name = name
        self.placeholders: list[Node] = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        self.constants: list[torch.Tensor] = []
        self.anchored = self._anchored_inputs()
        self.fixed = frozenset(index for index, node in enumerate(self.placeholders) if "fixed" in node.meta)

    def program(self, args: Sequence[Any]) -> Program:
        """Return the program for the shapes, strides and integers of `args`.

        Raises
        ------
        CaptureError
            When an argument is not laid out as the graph was captured for.
        """
        return _ProgramBuilder(self, args).build()

    def _anchored_inputs(self) -> frozenset[int]:
        """Inputs that a graph addresses from their storage's start: ``as_strided`` gives absolute offsets."""
        absolute = [n for n in self.graph_module.graph.nodes if n.target is torch.ops.aten.as_strided.default]
        if not absolute:
            return frozenset()
        bases = self._bases()
        return frozenset().union(*(bases.get(node.args[0], frozenset()) for node in absolute))

    def _bases(self) -> dict[Node, frozenset[int]]:
        """For each node, the inputs whose storage what it returns lies in."""
        bases: dict[Node, frozenset[int]] = {node: frozenset([i]) for i, node in enumerate(self.placeholders)}
        for node in self.graph_module.graph.nodes:
            if node.op == "call_function":
                mine = storages_of(node)
                shared = [bases[n] for n in node.all_input_nodes if n in bases and mine & storages_of(n)]
                bases[node] = frozenset().union(*shared)
        return bases


def _conjugate_number(number: complex, fake: torch.Tensor) -> dict[str, Any]:
    """Return what to call ``scalar_tensor`` with for the conjugate of a number: in the gradient of ``1j * x``, say.

    Views have no kernels. Where the result is conjugated lazily, it is the number itself that lies in memory.
    """
    return {"s": number if fake.is_conj() else number.conjugate(), "dtype": fake.dtype}


def storages_of(node: Node) -> set[int]:
    """Return the storages of the strided tensors that a node gives, each as a number."""
    strided = (tensor for tensor in _tensors(node.meta.get("val")) if tensor.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in strided}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class _ProgramBuilder:
    """Walks a graph once and writes down its program."""

    def __init__(self, graph: CapturedGraph, args: Sequence[Any]) -> None:
        self.graph = graph
        self.args = args
        self.symbols = SymbolValues()
        self.values: dict[Node, Any] = {}
        self.fakes: dict[int, Any] = {}
        self.calls: list[OpCall] = []
        self.buffers: list[BufferSpec] = []
        self.inputs: list[Any] = []
        self.constants: list[TensorSpec] = []

    def build(self) -> Program:
        self._bind_inputs()
        outputs: tuple[Any, ...] = ()
        for node in self.graph.graph_module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                outputs = self._output_values(node.args[0])
        self._mark_outputs(outputs)
        return Program(
            calls=tuple(self.calls),
            buffers=tuple(self.buffers),
            inputs=tuple(self.inputs),
            outputs=outputs,
            constants=tuple(self.constants),
            anchored=self.graph.anchored,
            fixed=self.graph.fixed,
            name=self.graph.name,
        )

    # -- inputs and constants

    def _bind_inputs(self) -> None:
        for node, arg in zip(self.graph.placeholders, self.args, strict=True):
            fake = node.meta.get("val")
            if isinstance(fake, torch.Tensor) and isinstance(arg, torch.Tensor):
                if len(fake.shape) == arg.dim():
                    self.symbols.bind_tensor(fake, arg)
            else:
                self.symbols.bind(fake, arg)
        for index, (node, arg) in enumerate(zip(self.graph.placeholders, self.args, strict=True)):
            if not isinstance(arg, torch.Tensor):
                self.values[node] = arg
                self.inputs.append(arg)
                continue
            whole = index in self.graph.anchored
            if index in self.graph.fixed:  # it may be packed, and have no strides of its own
                spec = input_spec(node.meta["val"], len(self.buffers), whole)
            else:
                spec = input_spec(arg, len(self.buffers), whole)
                self._check_input(index, node.meta.get("val"), spec)
            self._add_buffer(spec, BufferKind.INPUT, arg, index)
            self.values[node] = spec
            self.inputs.append(spec)

    def _check_input(self, index: int, fake: Any, spec: TensorSpec) -> None:
        """The graph's strides follow from those that it was captured with, so an input must come with them."""
        if not isinstance(fake, torch.Tensor):
            raise CaptureError(
                f"input {index} of {self.graph.name} is a tensor, but the graph was captured for {fake!r}"
            )
        device = self.args[index].device
        if device != fake.device:
            raise CaptureError(
                f"input {index} of {self.graph.name} came on '{device}', but the graph was captured for {fake.device}",
                hint="call torch._dynamo.reset() and compile again",
            )
        shape, strides = self.symbols.ints(fake.shape), self.symbols.ints(fake.stride())
        same = shape == spec.shape and dtype_of(fake.dtype) == spec.dtype
        if same and 0 not in shape:
            same = all(a == b or size == 1 for a, b, size in zip(strides, spec.strides, spec.shape, strict=True))
        if not same:
            raise CaptureError(
                f"input {index} of {self.graph.name} came as {spec} with strides {spec.strides}, but the graph was "
                f"captured for {dtype_of(fake.dtype).short}{list(shape)} with strides {strides}",
                hint="call torch._dynamo.reset() and compile again",
            )

    def _constant(self, node: Node) -> Any:
        value = self.graph.graph_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        position = len(self.graph.constants)
        for known, tensor in enumerate(self.graph.constants):
            if tensor is value:
                position = known
                break
        else:
            self.graph.constants.append(value)
        spec = input_spec(value, len(self.buffers), whole_storage=False)
        self._add_buffer(spec, BufferKind.CONSTANT, value, position)
        self.constants.append(spec)
        return spec

    def _add_buffer(self, spec: TensorSpec, kind: BufferKind, tensor: torch.Tensor, source: int | None = None) -> None:
        where = None if tensor.device.type == "cpu" else str(tensor.device)
        self.buffers.append(BufferSpec(spec.buffer, _end(spec), kind, None, source, where))

    # -- calls

    def _call(self, node: Node) -> Any:
        if is_operator(node.target):
            fake = node.meta.get("val")
            if isinstance(fake, (torch.Tensor, list, tuple)) or fake is None:
                return self._operator(node, schema_of(node.target), fake)
            return self.symbols.value(fake)  # a size, say
        args = torch.fx.node.map_arg(node.args, lambda n: self.values[n])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self.values[n])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)  # getitem on results, arithmetic on sizes

    def _operator(self, node: Node, schema: OperatorSchema, fake: Any) -> Any:
        arguments: dict[str, Any] = {}
        overload: Any = node.target
        for argument, value in zip(schema.arguments, node.args, strict=False):
            arguments[argument.name] = self._outermost(value)
        for name, value in node.kwargs.items():
            arguments[name] = self._outermost(value)
        if schema.signature == "aten::_conj" and isinstance(arguments["self"], complex):
            overload = torch.ops.aten.scalar_tensor.default
            schema, arguments = schema_of(overload), _conjugate_number(arguments["self"], fake)
        inputs = tuple(spec for value in arguments.values() for spec in flatten_tensors(value))
        aliases = self._aliases(node) if schema.signature not in MISTAKEN_ALIASES else {}
        first_new = len(self.buffers)
        result = self._result(fake, aliases, {}, node)
        fresh = tuple(spec for spec in flatten_tensors(result) if spec.buffer >= first_new)
        if not (fresh or schema.writes) and inputs and any(True for _ in flatten_tensors(result)):
            return result  # a view: nothing to run
        written = tuple(
            spec
            for argument in schema.arguments
            if argument.writes and argument.name in arguments
            for spec in flatten_tensors(arguments[argument.name])
        )
        self.calls.append(
            OpCall(
                id=len(self.calls),
                name=node.name,
                signature=schema.signature,
                arguments=arguments,
                inputs=inputs,
                outputs=written + fresh,
                results=_flatten_results(result),
                provenance=Provenance(node.meta.get("stack_trace") or ""),
                random=schema.random,
                overload=overload,
            )
        )
        return result

    def _outermost(self, value: Any) -> Any:
        """Return an argument that is no part of a list: there, a number that follows from sizes is computed with."""
        follows = isinstance(value, Node) and isinstance(value.meta.get("val"), torch.SymInt)
        return SizeNumber(self._argument(value)) if follows else self._argument(value)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item) for item in value)
        return self.symbols.value(value)

    def _aliases(self, node: Node) -> dict[int, tuple[torch.Tensor, TensorSpec]]:
        """The node's tensor arguments by storage, to recognize results that share one."""
        found: dict[int, tuple[torch.Tensor, TensorSpec]] = {}
        for source in node.all_input_nodes:
            for fake, spec in _pairs(source.meta.get("val"), self.values[source]):
                found.setdefault(fake.untyped_storage()._cdata, (fake, spec))
        return found

    def _result(
        self, fake: Any, aliases: dict[int, tuple[torch.Tensor, TensorSpec]], fresh: dict[int, int], node: Node
    ) -> Any:
        if isinstance(fake, (list, tuple)):
            return tuple(self._result(item, aliases, fresh, node) for item in fake)
        if not isinstance(fake, torch.Tensor):
            return self.symbols.value(fake)
        storage = fake.untyped_storage()._cdata
        shape, strides = self.symbols.ints(fake.shape), self.symbols.ints(fake.stride())
        dtype, offset = dtype_of(fake.dtype), self.symbols.value(fake.storage_offset())
        if storage in aliases:
            buffer, offset = self._alias_offset(*aliases[storage], dtype.itemsize, offset, node)
        else:
            buffer = fresh.get(storage, len(self.buffers))
        spec = TensorSpec(dtype, shape, strides, offset, buffer, fake.is_conj(), fake.is_neg())
        if buffer == len(self.buffers):
            fresh[storage] = buffer
            self._add_buffer(spec, BufferKind.INTERMEDIATE, fake)
        elif _end(spec) > self.buffers[buffer].nbytes:
            self.buffers[buffer] = replace(self.buffers[buffer], nbytes=_end(spec))
        return spec

    def _alias_offset(
        self, base_fake: torch.Tensor, base: TensorSpec, itemsize: int, offset: int, node: Node
    ) -> tuple[int, int]:
        """Return buffer and element offset of a view, given its fake's offset in the base's storage."""
        source = self.buffers[base.buffer].source
        kind = self.buffers[base.buffer].kind
        whole = kind is BufferKind.INPUT and source in self.graph.anchored
        if (
            node.target is torch.ops.aten.as_strided.default
            and len(node.args) > 3
            and node.args[3] is not None
            and whole
        ):
            return base.buffer, int(self._argument(node.args[3]))
        base_itemsize = base.dtype.itemsize
        from_base = offset * itemsize - self.symbols.value(base_fake.storage_offset()) * base_itemsize
        return base.buffer, (base.storage_offset * base_itemsize + from_base) // itemsize

    # -- outputs

    def _output_values(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What a node returns is one tensor however often it is returned; what two nodes return are two."""
        first: dict[Node, int] = {}
        outputs: list[Any] = []
        for position, value in enumerate(values):
            earlier = first.setdefault(value, position) if isinstance(value, Node) else position
            outputs.append(OutputRef(earlier) if earlier != position else self._output(value))
        return tuple(outputs)

    def _output(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value.op == "placeholder" and isinstance(self.values[value], TensorSpec):
                return InputRef(self.graph.placeholders.index(value))
            return self.values[value]
        return self.symbols.value(value)

    def _mark_outputs(self, outputs: Sequence[Any]) -> None:
        for spec in flatten_tensors(tuple(outputs)):
            old = self.buffers[spec.buffer]
            if old.kind is BufferKind.INTERMEDIATE:
                self.buffers[spec.buffer] = replace(old, kind=BufferKind.OUTPUT)


def _end(spec: TensorSpec) -> int:
    """First byte past those that a tensor touches; 0 for one without elements, wherever in its buffer it begins."""
    return spec.range.end if spec.numel else 0


def _pairs(fake: Any, spec: Any) -> Iterator[tuple[torch.Tensor, TensorSpec]]:
    if isinstance(fake, torch.Tensor):
        if isinstance(spec, TensorSpec):
            yield fake, spec
    elif isinstance(fake, (list, tuple)) and isinstance(spec, tuple):
        for one_fake, one_spec in zip(fake, spec, strict=False):
            yield from _pairs(one_fake, one_spec)


def _flatten_results(result: Any) -> tuple[TensorSpec | None, ...]:
    if isinstance(result, tuple):
        return tuple(spec for item in result for spec in _flatten_results(item))
    return (result if isinstance(result, TensorSpec) else None,)
