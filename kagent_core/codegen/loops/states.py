"""Running states of compound reductions, whatever the order of the loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.compound import COMPOUNDS, Compound
from kagent_core.codegen.elements import Element
from kagent_core.codegen.expressions import COMPOUND, Expr, Expressions, operands, walk
from kagent_core.codegen.text import bare
from kagent_core.codegen.writer import Parameters, Statements


def is_compound(node: Expr) -> bool:
    """Whether a node is a reduction whose state has several parts."""
    return node.op == "reduce" and node.payload.kind == COMPOUND


def within_block(*roots: Expr) -> list[Expr]:
    """Return the nodes that are computed for each block, operands first: all but what earlier passes have found."""
    found: list[Expr] = []
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            found.append(node)
        elif node.number not in seen and node.op != "part" and (node.op != "reduce" or node.payload.in_block):
            seen.add(node.number)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(operands(node)))
    return found


class RunningState:
    """The running state of one compound reduction: a variable for each of its parts.

    Parameters
    ----------
    node
        The reduction. Its operands are the parts of what a block of elements comes to.
    statements
        The kernel's, for names that are not taken.
    parameters
        The kernel's.
    language
        How things are spelled.
    """

    def __init__(self, node: Expr, statements: Statements, parameters: Parameters, language: CFamily) -> None:
        self.node = node
        self.kind: Compound = COMPOUNDS[node.payload.compound]
        self._parameters = parameters
        self._language = language
        self._expressions = Expressions(wide=language.wide)
        self.names = [statements.fresh_name(f"{self.kind.name}_{part.name}") for part in self.kind.parts]
        self.found = [statements.fresh_name(f"found_{part.name}") for part in self.kind.parts]
        """Names for the parts of a block's state."""

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Types and names of the parts."""
        kinds = [self._language.value_type(part.dtype) for part in self.node.args]
        return list(zip(kinds, self.names, strict=True))

    def first(self) -> Iterator[str]:
        """Yield what each part is before anything is taken."""
        for part, made in zip(self.kind.parts, self.node.args, strict=True):
            if part.first == "least":
                yield bare(self._language.least(made.dtype))
            elif part.first == "greatest":
                yield bare(self._language.greatest(made.dtype))
            else:
                assert not isinstance(part.first, str)
                yield self._language.literal(part.first, made.dtype)

    def merge(self, found: Sequence[str], lane: str = "") -> list[str]:
        """Return statements, for a `scope` of their own, that merge another state into this one.

        Parameters
        ----------
        found
            Texts of the other state's parts.
        lane
            What stands behind the names of this one's parts, such as a place in an array.
        """
        places = [f"{name}{lane}" for name in self.names]
        mine, others = self._elements("mine"), self._elements("others")
        texts = dict(zip((*mine, *others), (*places, *found), strict=True))
        merged = [element.expr for element in self.kind.merge(mine, others)]
        statements, lines = self._computed(merged, texts)
        after = [f"merged_{part.name}" for part in self.kind.parts]
        lines += [
            f"const {kind} {name} = {bare(statements.value(value))};"
            for (kind, _), name, value in zip(self.variables, after, merged, strict=True)
        ]
        return [*lines, *(f"{place} = {name};" for place, name in zip(places, after, strict=True))]

    def unchanged(self, first: str, lane: str = "") -> str | None:
        """Return the condition under which a block, of whose state the first part is given, changes nothing."""
        if self.kind.unchanged is None:
            return None
        mine, other = self._elements("mine"), self._elements("others")[0]
        texts = {**dict(zip(mine, (f"{name}{lane}" for name in self.names), strict=True)), other: first}
        same = self.kind.unchanged(mine, other).expr
        return bare(self._named(texts).value(same))

    def _elements(self, side: str) -> list[Element]:
        return [
            Element(self._expressions.given(part.dtype, frozenset(), f"{side} {number}"), self._expressions)
            for number, part in enumerate(self.node.args)
        ]

    def _computed(self, values: Sequence[Expr], texts: Mapping[Element, str]) -> tuple[Statements, list[str]]:
        """Return statements for values that are made of what has texts, and what gives the values' own text."""
        statements = self._named(texts)
        return statements, statements.place(values, [])[0]

    def _named(self, texts: Mapping[Element, str]) -> Statements:
        statements = Statements(self._language, self._parameters, {})
        for element, text in texts.items():
            statements.name(element.expr, text)
        return statements


def parts_by_state(*values: Expr) -> dict[int, list[Expr]]:
    """Return, by the number of each compound reduction, the parts of it that some values are made of."""
    found: dict[int, list[Expr]] = {}
    for node in walk(*values):
        if node.op == "part":
            found.setdefault(node.args[0].number, []).append(node)
    return found


def scope(statements: Sequence[str]) -> list[str]:
    """Return statements between braces: names that they declare are theirs alone."""
    return ["{", *(f"    {line}" for line in statements), "}"]
