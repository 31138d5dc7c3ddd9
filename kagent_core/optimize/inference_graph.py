"""An inference graph that is being rewritten: its constant part, and safe ways to change it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from kagent_core.capture.schemas import is_operator, schema_of


class InferenceGraph:
    """A copy of a graph that asks for no gradients, whose parameters are constants.

    Every node that is inserted carries the fake tensor that it gives, as captured nodes do.

    Parameters
    ----------
    graph_module
        As AOTAutograd makes it: functional, but for ``copy_`` into its inputs.
    parameters
        Positions of the inputs that are parameters or buffers of the model.
    is_free
        Given a signature, whether its calls may be rewritten: not where the user has a kernel or a device for them.
    """

    def __init__(
        self, graph_module: GraphModule, parameters: Collection[int], is_free: Callable[[str], bool] = lambda _: True
    ) -> None:
        self.graph = Graph()
        val_map: dict[Node, Node] = {}
        output = self.graph.graph_copy(graph_module.graph, val_map)
        for old, new in val_map.items():
            new.meta = dict(old.meta)
        self.graph.output(output)
        self.module = graph_module
        self.placeholders: list[Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        mode = detect_fake_mode([node.meta.get("val") for node in self.placeholders])
        self._mode: FakeTensorMode = mode if mode is not None else FakeTensorMode(allow_non_fake_inputs=True)
        self._is_free = is_free
        written = {node for call in self.graph.nodes for node in _written_by(call)}
        self.parameters = frozenset(
            node for position, node in enumerate(self.placeholders) if position in parameters and node not in written
        )
        self.captured: dict[Node, Any] = {node: node.meta.get("val") for node in self.graph.nodes}
        self._constants: set[Node] = set()
        self.note_constants()

    # -- asking

    def calls(self, *targets: Any) -> list[Node]:
        """Return the calls of some operators, in order."""
        wanted = set(targets)
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in wanted]

    def is_constant(self, node: Any) -> bool:
        """Whether a value depends on nothing but parameters: then it is computed once."""
        return not isinstance(node, Node) or node in self._constants

    def is_free(self, node: Node) -> bool:
        """Whether a call may be rewritten."""
        return is_operator(node.target) and self._is_free(schema_of(node.target).signature)

    @staticmethod
    def fake(node: Any) -> torch.Tensor:
        """Return the fake tensor of what a node gives."""
        value = node.meta["val"]
        assert isinstance(value, torch.Tensor), node
        return value

    @staticmethod
    def only_user(node: Node) -> Node | None:
        """Return the one node that uses another one; None where there are more, or none."""
        users = list(node.users)
        return users[0] if len(users) == 1 and users[0].op == "call_function" else None

    # -- changing

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert what is made in the block before a node, of whose line in the user's program it is."""
        self._place = node
        with self.graph.inserting_before(node):
            yield

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of an operator. Sizes that are not known before a call are those that the graph computes."""
        args, kwargs = tree_map(self._size_of, (args, kwargs))
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {"val": self.evaluated(node)}
        self._inherit(node)
        return node

    def prepared(self, function: Callable[..., Any], *args: Any, like: Any) -> Node:
        """Insert a call of a Python function on constants: a computation in a precision, or a packed form of weights.

        Parameters
        ----------
        function
            Called with tensors whenever constants are computed.
        args
            Constants.
        like
            A fake tensor with the shape, the strides and the dtype of its result; or a tuple of them.
        """
        node = self.graph.call_function(function, args)
        with self._mode:  # memory of its own: what looks like its argument is no view of that
            fresh = tree_map(lambda fake: torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype), like)
        node.meta = {"val": fresh, "prepared": True}
        self._inherit(node)
        return node

    def evaluated(self, node: Node) -> Any:
        """Return the fake tensors that a call gives."""
        args = map_arg(node.args, lambda n: n.meta["val"])
        kwargs = map_arg(node.kwargs, lambda n: n.meta["val"])
        with self._mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def replace(self, old: Node, new: Node) -> None:
        """Let everything that uses a node use another one."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.captured.setdefault(new, self.captured.get(old))

    def clean(self) -> None:
        """Drop what nothing uses."""
        for node in reversed(self.graph.nodes):
            if node.op in ("call_function", "get_attr") and not node.users and not _writes(node):
                self.graph.erase_node(node)
                self._constants.discard(node)

    # -- what is constant

    def note_constants(self) -> None:
        """Find out anew what is constant: after rewriting what others are computed from."""
        self._constants.clear()
        for node in self.graph.nodes:
            self._note(node)

    def _size_of(self, value: Any) -> Any:
        """Return the node that gives a symbolic size, where there is one before the place; else the value."""
        if isinstance(value, torch.SymInt):
            for node in self.graph.nodes:
                if node is self._place:
                    break
                known = node.meta.get("val")
                if isinstance(known, torch.SymInt) and known.node.expr == value.node.expr:
                    return node
        return value

    def _inherit(self, node: Node) -> None:
        for name in ("stack_trace", "nn_module_stack"):
            if name in self._place.meta:
                node.meta[name] = self._place.meta[name]
        self._note(node)

    def _note(self, node: Node) -> None:
        if node.op == "placeholder":
            constant = node in self.parameters
        elif node.op == "get_attr":
            constant = isinstance(node.meta.get("val"), torch.Tensor)
        else:
            given = node.all_input_nodes
            constant = node.op == "call_function" and _is_pure(node) and all(map(self.is_constant, given))
        if constant:
            self._constants.add(node)


def _written_by(node: Node) -> list[Any]:
    """Return the arguments that a call writes in place."""
    if not _writes(node):
        return []
    arguments = schema_of(node.target).arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    written = [given.get(argument.name) for argument in arguments if argument.writes]
    return [leaf for value in written for leaf in (value if isinstance(value, (list, tuple)) else [value])]


def _writes(node: Node) -> bool:
    return node.op == "call_function" and is_operator(node.target) and schema_of(node.target).writes


def _is_pure(node: Node) -> bool:
    if not is_operator(node.target):
        return "prepared" in node.meta or getattr(node.target, "__module__", "") in ("_operator", "operator")
    schema = schema_of(node.target)
    return not schema.writes and not schema.random


def is_view(node: Node) -> bool:
    """Whether a call gives a view on the memory of one of its arguments."""
    made = node.meta.get("val")
    if not isinstance(made, FakeTensor | torch.Tensor):
        return False
    storage = made.untyped_storage()._cdata
    given = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage for value in given)
