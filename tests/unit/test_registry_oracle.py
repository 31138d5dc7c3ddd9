"""Registry lookups compared with an oracle that tries every kernel."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.errors import KernelNotFoundError, RegistryError
from kagent_core.layout import ANY_STRIDES, CHANNELS_LAST, CONTIGUOUS, at_most
from kagent_core.registry import KernelRegistry
from kagent_core.specs import DType, KernelDescriptor, OpCall, TensorSpec

SIGNATURES = ["aten::relu", "aten::add.Tensor", "aten::add.Scalar", "prims::add"]
DTYPES = [DType("float32", 4), DType("float64", 8), DType("int64", 8)]
SHAPES = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((4,), (2,)), ((), ()), ((2, 3, 2, 2), (12, 1, 6, 3)), ((0, 3), (9, 9))]


@dataclass
class Entry:
    """A kernel, and its conditions told without the code under test."""

    kernel: KernelDescriptor
    accepts: object
    layer: int


def contiguous(tensor):
    if 0 in tensor.shape:
        return True
    expected = 1
    for size, stride in zip(tensor.shape[::-1], tensor.strides[::-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


LAYOUTS = [
    (ANY_STRIDES, lambda t: True),
    (CONTIGUOUS, contiguous),
    (at_most(1), lambda t: len(t.shape) <= 1),
    (CONTIGUOUS & at_most(2), lambda t: contiguous(t) and len(t.shape) <= 2),
    (CHANNELS_LAST | CONTIGUOUS, lambda t: contiguous(t) or t.strides == (12, 1, 6, 3)),
]


def tensors(buffer):
    def make(dtype, shape, conj, neg):
        return TensorSpec(dtype, *shape, 0, buffer, conj, neg)

    rarely = st.sampled_from([False] * 7 + [True])
    return st.builds(make, st.sampled_from(DTYPES), st.sampled_from(SHAPES), rarely, rarely)


@st.composite
def calls(draw):
    one, other, out = draw(tensors(0)), draw(tensors(1)), draw(tensors(2))
    signature = draw(st.sampled_from([*SIGNATURES, "aten::neg"]))
    return OpCall(0, "c", signature, {"self": one, "other": other}, (one, other), (out,), (out,))


@st.composite
def entries(draw, number):
    dtypes = draw(st.none() | st.sets(st.sampled_from([d.name for d in DTYPES]), min_size=1))
    layout, general = draw(st.sampled_from(LAYOUTS))
    special = draw(st.dictionaries(st.sampled_from(["self", "out"]), st.sampled_from(LAYOUTS), max_size=1))
    lazy = draw(st.booleans())
    kernel = KernelDescriptor(
        draw(st.sampled_from([*SIGNATURES, "default"])),
        f"k{number}",
        dtypes=None if dtypes is None else frozenset(dtypes),
        layout=layout,
        layouts={name: given for name, (given, _) in special.items()},
        lazy_bits=lazy,
        priority=draw(st.integers(-1, 1)),
    )

    def accepts(call):
        named = {"self": call.inputs[0], "other": call.inputs[1], "out": call.outputs[0]}
        return all(
            (dtypes is None or tensor.dtype.name in dtypes)
            and (lazy or not (tensor.conj or tensor.neg))
            and special.get(name, (None, general))[1](tensor)
            for name, tensor in named.items()
        )

    return Entry(kernel, accepts, draw(st.integers(0, 2)))


def oracle(table, resolved, call):
    """The name of the kernel, "tie" or None: layer by layer, then what is resolved, then the default kernels."""
    for signature in (call.signature, "default"):
        for layer in (2, 1, 0):
            fitting = [e for e in table if (e.kernel.signature, e.layer) == (signature, layer) and e.accepts(call)]
            if fitting:
                top = max(entry.kernel.priority for entry in fitting)
                names = [entry.kernel.name for entry in fitting if entry.kernel.priority == top]
                return names[0] if len(names) == 1 else "tie"
        on_demand = resolved is not None and resolved.kernel.signature == call.signature == signature
        if on_demand and resolved.accepts(call):
            return resolved.kernel.name
    return None


TABLES = st.integers(0, 8).flatmap(lambda count: st.tuples(*map(entries, range(count))))


@settings(max_examples=400, deadline=None)
@given(TABLES, entries(99), st.booleans(), calls())
def test_lookups_are_those_of_the_oracle(table, library, with_library, call):
    resolver = (lambda c: library.kernel if c.signature == library.kernel.signature else None) if with_library else None
    registry = KernelRegistry("toy", resolver)
    for entry in table:
        if entry.layer == 0:
            registry.add(entry.kernel)
    registry.freeze()
    registry = registry.overlaid(*([e.kernel for e in table if e.layer == layer] for layer in (2, 1)))
    expected = oracle(table, library if with_library else None, call)
    assert registry.has(call) == (expected is not None)
    if expected == "tie":
        with pytest.raises(RegistryError, match="with priority"):
            registry.find(call)
    elif expected is None:
        with pytest.raises(KernelNotFoundError) as caught:
            registry.find(call)
        close = [e for e in table if e.kernel.signature in (call.signature, "default")]
        assert all(f"'{entry.kernel.name}' " in caught.value.message for entry in close)
    else:
        assert registry.find(call).name == expected
