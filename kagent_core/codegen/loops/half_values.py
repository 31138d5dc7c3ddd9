"""Values that are kept in 16 bits from one operator to the next, for devices that compute with halves as they are.

An operator of float16 or bfloat16 computes in float32 and rounds what comes out. A sum, difference or product of halves
that is rounded only once, to the half type, is the same number: float32 is so wide that to round twice does no harm.

- A product of two numbers of p bits has 2 p of them, 22 of float16's and 16 of bfloat16's: it is exact in float32, but
  for products of bfloat16 that are so small that bits beyond float32's last one, 2**-149, are lost. A number of 16 bits
  that has such a bit is less than 2**-134, half of bfloat16's least number. It becomes 0 if rounded once, and so it
  does after float32 has made 2**-134 of it at most, a tie that goes to the even number.
- Of a sum a + b, let a be the greater number, and d how much greater its exponent is. The sum has d + p + 1 bits at
  most: it is exact in float32 where d is 23 - p or less. Where it is greater, b is less than a quarter of a's last bit,
  since p is 11 or 8. Whether float32 has rounded in between or not, the sum then becomes a.

Sums and products that leave the type's range do so both ways. Quotients and functions stay in float32.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.expressions import Expr, operands, rounded, walk
from kagent_core.codegen.kernel import Store


@dataclass(frozen=True)
class HalfValues:
    """Which values of a kernel are kept in 16 bits.

    Attributes
    ----------
    kinds
        Their half types, by number.
    widened
        Those of them that are needed in float32, too.
    """

    kinds: Mapping[int, str] = field(default_factory=dict)
    widened: frozenset[int] = frozenset()


NO_HALVES = HalfValues()


def half_values(stores: Sequence[Store], arithmetic: Collection[str]) -> HalfValues:
    """Return the values that are better kept in 16 bits.

    They are sums, differences and products of halves wherever all that need them round them to the halves' type; those
    halves; and what they are rounded to. Halves that cost nothing more in 16 bits count: what comes from memory, or has
    been rounded anyway.

    Parameters
    ----------
    stores
        Of a kernel.
    arithmetic
        The primitives that the device computes of vectors of halves.
    """
    if not arithmetic:
        return NO_HALVES
    nodes = list(walk(*(store.value for store in stores)))
    needed = _needed_as(nodes, stores)
    computed: dict[int, str] = {}
    for node in nodes:
        kinds = needed[node.number] if node.op in arithmetic and node.dtype == "float32" else ()
        kind = next(iter(kinds)) if len(kinds) == 1 else ""
        if kind in HALVES and node.axes and all(_is_half(arg, kind) for arg in node.args):
            computed[node.number] = kind
    found = dict(computed)
    for node in nodes:
        if node.number in computed:
            found.update((arg.args[0].number, arg.args[0].dtype) for arg in node.args if arg.op == "cast")
        elif node.dtype in HALVES and node.op == "cast" and computed.get(node.args[0].number) == node.dtype:
            found[node.number] = node.dtype
    return HalfValues(found, _needed_wide(nodes, stores, found, computed))


def half_bits(value: float, kind: str) -> int:
    """Return a number as a half type has it.

    Examples
    --------
    >>> hex(half_bits(1.5, "float16")), hex(half_bits(-0.0, "bfloat16"))
    ('0x3e00', '0x8000')
    """
    if kind == "float16":
        return int.from_bytes(struct.pack("<e", value), "little")
    return int.from_bytes(struct.pack("<f", value), "little") >> 16


def _needed_as(nodes: Iterable[Expr], stores: Iterable[Store]) -> Mapping[int, set[str]]:
    """Return the types that each value is converted to; an empty name is for another use."""
    needed: dict[int, set[str]] = defaultdict(set)
    for node in nodes:
        for arg in operands(node):
            needed[arg.number].add(node.dtype if node.op == "cast" else "")
    for store in stores:
        needed[store.value.number].add(store.tensor.dtype.name)
    return needed


def _is_half(node: Expr, kind: str) -> bool:
    """Whether a float32 is a number of a half type, which is or might as well be there in 16 bits."""
    if node.op == "constant":
        return bool(rounded(node.payload, kind) == node.payload)
    return node.op == "cast" and node.args[0].dtype == kind and node.args[0].op in ("load", "cast")


def _needed_wide(
    nodes: Iterable[Expr], stores: Iterable[Store], found: Mapping[int, str], computed: Mapping[int, str]
) -> frozenset[int]:
    """Return which of the values that are found are needed in float32, or by what knows them in float32 only."""
    users = [(node, operands(node)) for node in nodes if node.number not in computed]
    direct = {arg.number: arg for node, args in users if not _passes_on(node, found) for arg in args}
    direct.update((store.value.number, store.value) for store in stores if store.tensor.dtype.name not in HALVES)
    inner = {arg.args[0].number for arg in direct.values() if arg.op == "cast" and arg.dtype == "float32"}
    return frozenset(found).intersection({*direct, *inner})


def _passes_on(node: Expr, found: Mapping[int, str]) -> bool:
    """Whether a conversion is none: between float32 and a value in 16 bits that stands for it."""
    if node.op != "cast":
        return False
    return node.args[0].number in found and (node.dtype == "float32" or node.number in found)
