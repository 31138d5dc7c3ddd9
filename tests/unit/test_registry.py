"""Finding the kernel for a call."""

import inspect
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kagent_core.errors import KernelNotFoundError, RegistryError
from kagent_core.layout import CHANNELS_LAST, CONTIGUOUS, at_most
from kagent_core.registry import KernelRegistry, group_tensors, named_tensors, refusal
from kagent_core.specs import Access, DType, KernelDescriptor, OpCall, Parameter, TensorSpec

F32, F64, I64 = DType("float32", 4), DType("float64", 8), DType("int64", 8)
HERE = str(Path(__file__))


def line() -> int:
    """Number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno


def spec(dtype=F32, shape=(2, 3), strides=(3, 1), buffer=0, **changes):
    return TensorSpec(dtype, shape, strides, 0, buffer, **changes)


def call_of(signature="aten::relu", *inputs, outputs=None, **arguments):
    inputs = inputs or (spec(),)
    results = (spec(inputs[0].dtype, buffer=9),) if outputs is None else outputs
    names = ["self", "other", "third"]
    given = dict(zip(names, inputs, strict=False)) | arguments
    return OpCall(0, "call", signature, given, inputs, results, results)


def kernel(name="plain", signature="aten::relu", **changes):
    return KernelDescriptor(signature, name, **changes)


def registry_of(*kernels, resolver=None):
    registry = KernelRegistry("toy", resolver)
    for each in kernels:
        registry.add(each)
    registry.freeze()
    return registry


def found(registry, call):
    return registry.find(call).name


def test_the_exact_signature_is_found_and_no_other():
    registry = registry_of(kernel(), kernel("add", "aten::add.Tensor"))
    assert found(registry, call_of("aten::add.Tensor")) == "add"
    assert registry.has(call_of("aten::add.Tensor"))
    assert registry.signatures() == ["aten::add.Tensor", "aten::relu"]
    assert [k.name for k in registry.kernels("aten::add.Tensor")] == ["add"]
    assert [k.name for k in registry.kernels()] == ["add", "plain"]
    assert registry.kernels("aten::add") == ()
    for loose in ("aten::add", "aten::add.Scalar", "add.Tensor"):
        assert not registry.has(call_of(loose))
        with pytest.raises(KernelNotFoundError):
            registry.find(call_of(loose))


@pytest.mark.parametrize("signature", ["prims::add", "quantized::add"])
def test_other_namespaces_are_signatures_like_any(signature):
    assert found(registry_of(kernel("mine", signature)), call_of(signature)) == "mine"


def test_the_highest_priority_that_accepts_wins():
    registry = registry_of(
        kernel("general"),
        kernel("fast", priority=5, layout=CONTIGUOUS),
        kernel("fastest", priority=9, dtypes=frozenset({"float64"})),
    )
    assert found(registry, call_of()) == "fast"
    assert found(registry, call_of("aten::relu", spec(strides=(1, 2)))) == "general"
    assert found(registry, call_of("aten::relu", spec(F64))) == "fastest"


def test_before_it_is_frozen_a_registry_answers_too():
    registry = KernelRegistry("toy")
    registry.add(kernel())
    assert not registry.frozen
    assert found(registry, call_of()) == "plain"
    registry.add(kernel("better", priority=1))
    assert found(registry, call_of()) == "better"
    registry.freeze()
    assert registry.frozen


# -- ties and origins


def test_a_tie_is_an_error_that_names_both_and_their_lines():
    registry = KernelRegistry("toy")
    registry.add(kernel("low", priority=-1))
    first = line() + 1
    registry.add(kernel("one"))
    registry.add(kernel("two"))
    registry.freeze()
    with pytest.raises(RegistryError) as caught:
        registry.find(call_of())
    assert caught.value.message == (
        f"2 kernels of 'toy' with priority 0 accept aten::relu: 'one' ({HERE}:{first}) and 'two' ({HERE}:{first + 1})"
    )
    assert "higher priority" in caught.value.hint
    assert registry.has(call_of())


def test_an_origin_that_was_given_is_kept():
    registry = registry_of(kernel("one", origin="plugin a, line 3"), kernel("two", origin="plugin b"))
    with pytest.raises(RegistryError, match=r"'one' \(plugin a, line 3\) and 'two' \(plugin b\)"):
        registry.find(call_of())


def test_no_tie_when_only_one_of_them_accepts():
    registry = registry_of(kernel("one", dtypes=frozenset({"int64"})), kernel("two"))
    assert found(registry, call_of()) == "two"


def test_one_name_twice_for_a_signature_is_refused():
    registry = KernelRegistry("toy")
    registry.add(kernel(origin="here"))
    registry.add(kernel(signature="aten::neg"))
    where = line() + 2
    with pytest.raises(RegistryError) as caught:
        registry.add(kernel())
    assert caught.value.message == (
        f"two kernels named 'plain' for aten::relu on 'toy': one from here, one from {HERE}:{where}"
    )
    assert len(registry.kernels("aten::relu")) == 1


def test_a_frozen_registry_takes_no_more_kernels():
    registry = registry_of(kernel())
    with pytest.raises(RegistryError, match=r"kernel 'late' for aten::relu comes too late.*'toy' is frozen") as caught:
        registry.add(kernel("late"))
    assert "kagent_core.kernel" in caught.value.hint
    assert registry.signatures() == ["aten::relu"]
    registry.freeze()  # once more does nothing
    assert found(registry, call_of()) == "plain"


def test_a_decorated_function_is_a_kernel_from_where_it_is_defined():
    registry = KernelRegistry("toy")

    @registry.kernel("aten::relu", dtypes={"float32"}, priority=3)
    def my_relu(x, out):
        raise AssertionError

    class Callable:
        def __call__(self, x, out):
            raise AssertionError

    registry.kernel("aten::neg")(Callable())
    [relu] = registry.kernels("aten::relu")
    assert (relu.name, relu.function, relu.dtypes, relu.priority) == ("my_relu", my_relu, {"float32"}, 3)
    assert relu.origin == f"{HERE}:{my_relu.__code__.co_firstlineno}"
    [neg] = registry.kernels("aten::neg")
    assert (neg.name, neg.origin.rpartition(":")[0]) == ("Callable", HERE)


# -- reasons

ROWS = spec(strides=(1, 2))


@pytest.mark.parametrize(
    ("changes", "came", "told"),
    [
        ({"dtypes": {"int64", "float32"}}, spec(F64), "takes float32, int64, not float64"),
        ({"layout": CONTIGUOUS}, ROWS, "takes contiguous tensors, not f32[2, 3] with strides (1, 2)"),
        (
            {"layout": CONTIGUOUS | CHANNELS_LAST},
            ROWS,
            "takes contiguous tensors or channels-last tensors, not f32[2, 3] with strides (1, 2)",
        ),
        (
            {"layout": at_most(2)},
            spec(shape=(1, 2, 3), strides=(6, 3, 1)),
            "takes tensors of at most 2 dimensions, not f32[1, 2, 3] with strides (6, 3, 1)",
        ),
        ({}, spec(conj=True), "does not read lazily conjugated or negated tensors, such as *f32[2, 3]"),
        ({}, spec(neg=True), "does not read lazily conjugated or negated tensors, such as -f32[2, 3]"),
    ],
)
def test_a_kernel_says_why_it_does_not_take_a_call(changes, came, told):
    fussy = kernel(**changes)
    assert refusal(fussy, call_of()) is None
    assert refusal(fussy, call_of("aten::relu", spec(), came)) == told
    assert refusal(fussy, call_of("aten::relu", spec(), outputs=(replace(came, buffer=5),))) == told


def test_a_layout_can_be_for_one_tensor():
    fussy = kernel(layouts={"other": CONTIGUOUS, "out": CONTIGUOUS})
    assert refusal(fussy, call_of("aten::relu", ROWS, spec())) is None
    told = "takes contiguous tensors as 'other', not f32[2, 3] with strides (1, 2)"
    assert refusal(fussy, call_of("aten::relu", spec(), ROWS)) == told
    out = spec(strides=(1, 2), buffer=4)
    assert "as 'out'" in refusal(fussy, call_of("aten::relu", outputs=(out,)))
    assert "as" not in refusal(kernel(layout=CONTIGUOUS), call_of("aten::relu", ROWS))


def test_several_results_have_numbers_and_a_list_has_one_name():
    one, two = spec(buffer=7), spec(strides=(1, 2), buffer=8)
    given = (spec(), ROWS)
    call = OpCall(0, "c", "aten::x", {"tensors": given, "dim": 0}, given, (one, two), (one, None, two))
    assert [name for name, _ in named_tensors(call)] == ["tensors", "tensors", "out0", "out1"]
    assert "as 'out1'" in refusal(kernel(layouts={"out1": CONTIGUOUS}), call)
    assert refusal(kernel(layouts={"out0": CONTIGUOUS}), call) is None
    assert "as 'tensors'" in refusal(kernel(layouts={"tensors": CONTIGUOUS}), call)


def test_a_result_that_is_an_argument_is_named_once():
    call = OpCall(0, "c", "aten::relu_", {"self": spec()}, (spec(),), (spec(),), (spec(),))
    assert [name for name, _ in named_tensors(call)] == ["self"]


@pytest.mark.parametrize("bits", [{"conj": True}, {"neg": True}])
def test_a_kernel_that_reads_lazy_bits_takes_them(bits):
    assert refusal(kernel(lazy_bits=True), call_of("aten::relu", spec(**bits))) is None


# -- a resolver


class Library:
    """A resolver that knows one signature."""

    def __init__(self, signature="aten::relu", delay=0.0, **changes):
        self.asked = []
        self.delay = delay
        self.made = kernel("library", signature, priority=100, **changes)

    def __call__(self, call):
        self.asked.append(call.signature)
        time.sleep(self.delay)
        return self.made if call.signature == self.made.signature else None


def test_a_resolver_is_asked_once_per_signature():
    library = Library()
    registry = registry_of(kernel("own", "aten::neg"), resolver=library)
    assert registry.resolves
    assert not registry_of().resolves
    assert registry.find(call_of()) is library.made
    assert registry.resolve(call_of()) is library.made
    assert registry.has(call_of("aten::relu", spec(F64)))
    assert not registry.has(call_of("aten::sin"))
    with pytest.raises(KernelNotFoundError):
        registry.find(call_of("aten::sin"))
    assert library.asked == ["aten::relu", "aten::sin"]
    assert registry.signatures() == ["aten::neg"]
    assert registry_of().resolve(call_of()) is None


def test_an_added_kernel_outranks_the_resolver_where_it_accepts():
    library = Library()
    registry = registry_of(kernel("own", layout=CONTIGUOUS, priority=-5), resolver=library)
    assert found(registry, call_of()) == "own"
    assert library.asked == []
    assert registry.find(call_of("aten::relu", ROWS)) is library.made


def test_what_a_resolver_gives_is_checked_like_any_kernel():
    registry = registry_of(resolver=Library(dtypes=frozenset({"float32"})))
    assert registry.has(call_of())
    doubles = call_of("aten::relu", spec(F64))
    assert not registry.has(doubles)
    with pytest.raises(KernelNotFoundError, match="'library' takes float32, not float64"):
        registry.find(doubles)


# -- the default kernel


def test_a_default_kernel_is_the_last_resort_and_says_so_once(caplog):
    def anything(overload, *args):
        return overload, args

    library = Library("aten::neg", dtypes=frozenset({"float32"}))
    registry = registry_of(
        kernel("fallback", "default", function=anything, origin="there"),
        kernel("doubles", dtypes={"float64"}),
        resolver=library,
    )
    with caplog.at_level(logging.WARNING, "kagent"):
        assert found(registry, call_of("aten::relu", spec(F64))) == "doubles"
        assert found(registry, call_of("aten::neg")) == "library"
        assert caplog.messages == []
        first = registry.find(call_of())
        assert registry.find(call_of()) is first
        assert found(registry, call_of("aten::neg", spec(F64))) == "fallback"
    assert caplog.messages == [
        f"{signature} runs with the default kernel 'fallback' of 'toy' (there): "
        "there is no kernel for it that takes what came"
        for signature in ("aten::relu", "aten::neg")
    ]
    assert (first.name, first.signature) == ("fallback", "default")
    assert first.function(1, 2) == (None, (1, 2))  # this call has no overload
    assert registry.has(call_of())


def test_a_default_kernel_in_source_is_given_as_it_is():
    registry = registry_of(kernel("text", "default", source="..."))
    assert registry.find(call_of()) == registry.kernels("default")[0]


def test_a_default_kernel_has_dtypes_too():
    registry = registry_of(kernel("fallback", "default", dtypes={"int64"}))
    assert not registry.has(call_of())
    with pytest.raises(KernelNotFoundError, match="'fallback' takes int64, not float32"):
        registry.find(call_of())


def test_two_default_kernels_can_tie():
    registry = registry_of(kernel("a", "default"), kernel("b", "default"))
    with pytest.raises(RegistryError, match=r"accept default: 'a' .* and 'b'"):
        registry.find(call_of())


# -- laid over


def test_kernels_laid_over_a_registry_outrank_it():
    library = Library("aten::neg")
    base = registry_of(kernel("plugin", priority=99), kernel("rescue", "default"), resolver=library)
    above = base.overlaid(
        [kernel("inner", dtypes={"float64"})], [kernel("outer"), kernel("mine", "aten::neg", priority=-9)]
    )
    assert found(above, call_of()) == "outer"
    assert found(above, call_of("aten::relu", spec(F64))) == "inner"
    assert found(above, call_of("aten::neg")) == "mine"
    assert found(above, call_of("aten::sin")) == "rescue"
    assert above.has(call_of("aten::sin"))
    assert [k.name for k in above.kernels("aten::relu")] == ["inner", "outer", "plugin"]
    assert above.frozen
    assert found(base, call_of()) == "plugin"
    assert base.find(call_of("aten::neg")) is library.made
    assert found(base.overlaid(), call_of()) == "plugin"


def test_a_default_kernel_laid_over_does_not_outrank_exact_ones():
    base = registry_of(kernel("plugin"), kernel("rescue", "default"))
    above = base.overlaid([kernel("mine", "default")])
    assert found(above, call_of()) == "plugin"
    assert found(above, call_of("aten::sin")) == "mine"


def test_what_was_resolved_below_is_not_resolved_again():
    library = Library()
    base = registry_of(resolver=library)
    for registry in (base, base.overlaid([kernel("x", "aten::neg")]), base.overlaid()):
        assert registry.find(call_of()) is library.made
    assert library.asked == ["aten::relu"]


def test_nothing_can_be_laid_over_an_open_registry():
    with pytest.raises(RegistryError, match="the registry of 'toy' is not frozen"):
        KernelRegistry("toy").overlaid([kernel()])


# -- fused kernels


def chain(*signatures, dtype=F32, last=None):
    """Calls of which each reads what the one before it made."""
    calls, source = [], spec(dtype, buffer=0)
    for number, signature in enumerate(signatures, 1):
        target = spec(dtype, buffer=number) if last is None or number < len(signatures) else last
        calls.append(OpCall(number, "c", signature, {"self": source}, (source,), (target,), (target,)))
        source = target
    return calls


RELU_SIGMOID = ("aten::relu", "aten::sigmoid")


def fused(name="both", fuses=RELU_SIGMOID, **changes):
    return KernelDescriptor("", name, fuses=fuses, **changes)


def test_a_fused_kernel_is_found_by_the_sequence_of_its_signatures():
    registry = registry_of(fused(), kernel())
    both = registry.find_fused(chain(*RELU_SIGMOID))
    assert (both.name, both.signature, both.fuses) == ("both", "aten::relu+aten::sigmoid", RELU_SIGMOID)
    for other in (RELU_SIGMOID[::-1], RELU_SIGMOID[:1], (*RELU_SIGMOID, "aten::relu")):
        assert registry.find_fused(chain(*other)) is None
    assert registry_of(kernel()).find_fused(chain(*RELU_SIGMOID)) is None


def test_fused_kernels_are_chosen_like_others():
    registry = registry_of(fused(), fused("double", dtypes={"float64"}, priority=1))
    assert registry.find_fused(chain(*RELU_SIGMOID)).name == "both"
    assert registry.find_fused(chain(*RELU_SIGMOID, dtype=F64)).name == "double"
    assert registry_of(fused(dtypes={"float64"})).find_fused(chain(*RELU_SIGMOID)) is None
    above = registry.overlaid([fused("mine")])
    assert above.find_fused(chain(*RELU_SIGMOID, dtype=F64)).name == "mine"
    tie = registry_of(fused("a", origin="x"), fused("b", origin="y"))
    with pytest.raises(RegistryError, match=r"accept aten::relu\+aten::sigmoid: 'a' \(x\) and 'b' \(y\)"):
        tie.find_fused(chain(*RELU_SIGMOID))


def test_what_a_group_uses_up_inside_has_a_dtype_but_no_layout():
    first, second = chain(*RELU_SIGMOID)
    inner = spec(F32, strides=(1, 2), buffer=1)
    first = OpCall(1, "c", "aten::relu", {"self": first.inputs[0]}, first.inputs, (inner,), (inner,))
    second = OpCall(2, "c", "aten::sigmoid", {"self": inner}, (inner,), second.outputs, second.results)
    assert registry_of(fused(layout=CONTIGUOUS)).find_fused([first, second]).name == "both"
    rows = chain(*RELU_SIGMOID, last=spec(strides=(1, 2), buffer=2))
    assert registry_of(fused(layout=CONTIGUOUS)).find_fused(rows) is None
    assert registry_of(fused(layouts={"self": CONTIGUOUS})).find_fused(rows).name == "both"
    half = chain("aten::relu", "aten::sigmoid", last=spec(F64, buffer=2))
    assert registry_of(fused(dtypes={"float32"})).find_fused(half) is None
    lazy = chain(*RELU_SIGMOID, last=spec(neg=True, buffer=2))
    assert registry_of(fused()).find_fused(lazy) is None
    assert registry_of(fused(lazy_bits=True)).find_fused(lazy).name == "both"


def relu_then(name, relu_is):
    """``relu`` and then an operator of two tensors, of which one comes from outside."""
    x, y, inner, out = (spec(buffer=number) for number in range(4))
    other = "other" if relu_is == "self" else "self"
    given = {"self": inner, "other": inner} | {other: y}
    inputs = tuple(given.values())
    return [
        OpCall(1, "c", "aten::relu", {"self": x}, (x,), (inner,), (inner,)),
        OpCall(2, "c", name, given, inputs, (out,), (out,)),
    ]


def test_the_tensors_of_a_group_have_names():
    names = lambda calls: [(name, tensor.buffer) for name, tensor in group_tensors(calls)]
    assert names(relu_then("aten::sub.Tensor", relu_is="self")) == [("self", 0), ("other", 1), ("out", 3)]
    assert names(relu_then("aten::sub.Tensor", relu_is="other")) == [("self", 0), ("self1", 1), ("out", 3)]


@pytest.mark.parametrize(("outside", "fits"), [("other", "self"), ("self1", "other")])
def test_a_prototype_tells_how_a_group_hangs_together(outside, fits):
    parameters = (
        Parameter("self", "const float*"),
        Parameter(outside, "const float*"),
        Parameter("out", "float*", Access.OUT),
        Parameter("n", "int64_t", derived="out.numel()"),
    )
    registry = registry_of(fused("sub", ("aten::relu", "aten::sub.Tensor"), parameters=parameters))
    for relu_is in ("self", "other"):
        kernel = registry.find_fused(relu_then("aten::sub.Tensor", relu_is))
        assert (kernel is not None) == (relu_is == fits)


def test_a_fused_kernel_that_wants_what_the_group_makes_is_not_taken():
    parameters = tuple(Parameter(name, "const float*") for name in ("self", "other", "out"))
    registry = registry_of(fused("sub", ("aten::relu", "aten::sub.Tensor"), parameters=parameters))
    assert registry.find_fused(relu_then("aten::sub.Tensor", "self")).name == "sub"
    calls = relu_then("aten::sub.Tensor", "self")
    calls[1].arguments["other"] = calls[0].results[0]  # relu(x) - relu(x)
    assert registry.find_fused(calls) is None


def test_the_signature_of_a_fused_kernel_is_that_of_its_operators():
    registry = registry_of(KernelDescriptor("aten::relu+aten::sigmoid", "both", fuses=RELU_SIGMOID))
    assert registry.find_fused(chain(*RELU_SIGMOID)).name == "both"
    told = r"'both' \(.*\) fuses aten::relu, aten::sigmoid, but its signature is 'aten::relu'"
    with pytest.raises(RegistryError, match=told) as caught:
        KernelRegistry("toy").add(KernelDescriptor("aten::relu", "both", fuses=RELU_SIGMOID))
    assert "'aten::relu+aten::sigmoid'" in caught.value.hint


# -- threads


def in_threads(count, work):
    """Run work(number) in threads that start together; return what they returned or raised, by number."""
    start, results = threading.Barrier(count), [None] * count

    def run(number):
        start.wait()
        try:
            results[number] = work(number)
        except Exception as error:  # noqa: BLE001
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_many_threads_ask_a_resolver_once():
    library = Library(delay=0.05)
    registry = registry_of(resolver=library)
    assert in_threads(8, lambda number: registry.find(call_of())) == [library.made] * 8
    assert library.asked == ["aten::relu"]


def test_many_threads_add_and_one_freezes():
    registry = KernelRegistry("toy")

    def work(number):
        if number == 0:
            registry.freeze()
            return len(registry.kernels())
        return [_added(registry, f"{number}-{i}", priority=1000 * number + i) for i in range(200)]

    frozen_with, *added = in_threads(8, work)
    kept = {name for names in added for name in names if name}
    assert {k.name for k in registry.kernels()} == kept
    assert frozen_with == len(kept)
    if kept:
        best = max(kept, key=lambda name: [int(part) for part in name.split("-")])
        assert found(registry, call_of()) == best


def _added(registry, name, priority):
    """Add a kernel; return its name, or None where the registry was frozen before."""
    try:
        registry.add(kernel(name, priority=priority))
    except RegistryError as error:
        if "is frozen" not in error.message:
            raise
        return None
    return name


def test_of_many_threads_that_add_one_name_one_succeeds():
    registry = KernelRegistry("toy")
    results = in_threads(8, lambda number: registry.add(kernel()))
    assert [r for r in results if r is None] == [None]
    assert all("two kernels named 'plain'" in r.message for r in results if r is not None)


def test_a_default_kernel_is_told_once_by_many_threads(caplog):
    registry = registry_of(kernel("fallback", "default", function=lambda *args: None))
    with caplog.at_level(logging.WARNING, "kagent"):
        results = in_threads(8, lambda number: registry.find(call_of()))
    assert len(caplog.messages) == 1
    assert all(result is results[0] for result in results)
