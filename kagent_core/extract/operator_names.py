"""The names that a prototype can use for one operator, and what they stand for in a call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.errors import PackingError
from kagent_core.prototype.expressions import Expression
from kagent_core.specs import OpCall, TensorSpec

_ITEM = re.compile(r"(\w*?[A-Za-z_])(\d+)")
_PROPERTY = re.compile(r"(?:(\w+)_)?(?:(numel|ndim|sizes|strides)|(size|stride)(\d+))")
_PROPERTY_TEXT = {"numel": "numel()", "ndim": "ndim", "sizes": "shape", "strides": "strides"}
_DESCRIBES_THE_RESULT = {"ScalarType", "Layout", "Device", "MemoryFormat"}


@dataclass(frozen=True, slots=True)
class OperatorArgument:
    """One argument of an operator's schema.

    Attributes
    ----------
    name
        As in ATen.
    type
        As torch's schema prints it, such as ``Optional[Tensor]``.
    writes
        Whether the operator writes it in place.
    required
        Whether it has no default and cannot be None.
    default
        Its default; None for one that has none and can be None.
    describes_the_result
        Whether it says how the result is laid out, which the result's own spec says too: a dtype, say.
    """

    name: str
    type: str
    writes: bool
    required: bool
    default: Any
    describes_the_result: bool

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor, or may be."""
        return self.type in ("Tensor", "Optional[Tensor]")

    @property
    def is_tensor_list(self) -> bool:
        """Whether it is a list of tensors."""
        return self.type.startswith(("List[Tensor", "List[Optional[Tensor"))


class OperatorNames:
    """The names that a prototype for one operator can use.

    They are, in this order: the operator's arguments; its results ``out``, ``out0``, ``out1``, ... and as its
    schema calls them; ``tensors0``, ``tensors1``, ... for the items of a list of tensors; and properties of a
    tensor: ``self_numel``, ``self_ndim``, ``self_sizes``, ``self_strides``, ``self_size0``, ``self_stride0``,
    which are those of the first result where the tensor's name is left out (of the first tensor that is written,
    where nothing is returned).

    Parameters
    ----------
    overload
        torch's ``OpOverload``.
    """

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.arguments = {argument.name: _argument(argument) for argument in schema.arguments}
        returns = schema.returns
        self._open_ended = any(str(value.type).startswith("List") for value in returns)
        self._result_count = len(returns)
        self._result_names = {value.name: i for i, value in enumerate(returns) if value.name}
        self.in_place = {i for i, value in enumerate(returns) if value.alias_info is not None}
        self._main = "out0" if returns else self._first_written()
        self._expressions: dict[str, Expression] = {}

    def result(self, name: str) -> int | None:
        """Return which result a name stands for, or None."""
        if name in self.arguments:
            return None
        if name in self._result_names:
            return self._result_names[name]
        match = re.fullmatch(r"out(\d*)", name)
        if match is None:
            return None
        if not match[1]:
            return 0 if self._result_count == 1 else None
        return int(match[1]) if self._open_ended or int(match[1]) < self._result_count else None

    def item(self, name: str) -> tuple[OperatorArgument, int] | None:
        """Return which item of which list of tensors a name stands for, or None."""
        match = _ITEM.fullmatch(name)
        argument = self.arguments.get(match[1]) if match and name not in self.arguments else None
        return (argument, int(match[2])) if match and argument and argument.is_tensor_list else None

    def property(self, name: str) -> Expression | None:
        """Return the expression that a property's name stands for, or None."""
        if name not in self._expressions:
            match = _PROPERTY.fullmatch(name)
            if match is None:
                return None
            owner = match[1] or self._main
            if not self._has_tensor(owner):
                return None
            text = _PROPERTY_TEXT[match[2]] if match[2] else f"{match[3]}({match[4]})"
            self._expressions[name] = Expression(f"{owner}.{text}")
        return self._expressions[name]

    def used(self, name: str) -> set[str]:
        """Return the arguments that a name speaks of.

        Raises
        ------
        KeyError
            When it is none of the names.
        """
        if name in self.arguments:
            return {name}
        item = self.item(name)
        if item is not None:
            return {item[0].name}
        if self.result(name) is not None:
            return set()
        expression = self.property(name)
        if expression is None:
            raise KeyError(name)
        return {used for owner in expression.names for used in self.used(owner)}

    def known(self) -> list[str]:
        """Names to tell of in a message."""
        results = [f"out{i}" for i in range(self._result_count)] if self._result_count > 1 else ["out"]
        return [*self.arguments, *results, *self._result_names]

    def _has_tensor(self, name: str) -> bool:
        argument = self.arguments.get(name)
        if argument is not None:
            return argument.is_tensor
        return self.result(name) is not None or self.item(name) is not None

    def _first_written(self) -> str:
        for argument in self.arguments.values():
            if argument.writes:
                return f"{argument.name}0" if argument.is_tensor_list else argument.name
        return ""


def _argument(argument: Any) -> OperatorArgument:
    real = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    return OperatorArgument(
        name=argument.name,
        type=str(argument.type),
        writes=argument.alias_info is not None and argument.alias_info.is_write,
        required=not argument.has_default_value() and not str(argument.type).startswith("Optional["),
        default=plain(argument.default_value),
        describes_the_result=real in _DESCRIBES_THE_RESULT or argument.name == "pin_memory",
    )


def plain(value: Any) -> Any:
    """Return an argument's value without torch's own types: dtypes, layouts and memory formats by their names."""
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    return tuple(plain(item) for item in value) if isinstance(value, (list, tuple)) else value


class CallValues:
    """The values of one call, by the names of `OperatorNames`."""

    def __init__(self, call: OpCall, names: OperatorNames) -> None:
        self.call = call
        self._names = names

    def argument(self, argument: OperatorArgument) -> Any:
        """Return an argument's value, or its default where the call leaves it out."""
        if argument.name in self.call.arguments:
            return plain(self.call.arguments[argument.name])
        if argument.required:
            raise PackingError(f"the call gives no '{argument.name}', and the operator has no default for it")
        return argument.default

    def result(self, index: int) -> TensorSpec | None:
        """Return a result, as the call returns it; None for one that it does not compute."""
        results = self.call.results
        if index >= len(results):
            raise PackingError(f"the call has {len(results)} results, and none with the number {index}")
        return results[index]

    def item(self, argument: OperatorArgument, index: int) -> Any:
        """Return one tensor of a list; None beyond its end."""
        value = self.argument(argument) or ()
        return value[index] if index < len(value) else None

    def __call__(self, name: str) -> Any:
        """Return the value of any name."""
        names = self._names
        if name in names.arguments:
            return self.argument(names.arguments[name])
        item = names.item(name)
        if item is not None:
            return self.item(*item)
        index = names.result(name)
        if index is not None:
            return self.result(index)
        expression = names.property(name)
        assert expression is not None, name  # binding has looked every name up
        return expression.evaluate(self)
