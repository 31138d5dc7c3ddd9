"""Finding the kernel for a call."""

import threading
import time

import pytest

from kagent_core.errors import KernelNotFoundError, RegistryError
from kagent_core.registry import KernelRegistry, refusal
from kagent_core.specs import DType, KernelDescriptor, OpCall, TensorSpec

F32, F64 = DType("float32", 4), DType("float64", 8)


def spec(dtype=F32, shape=(2, 3), strides=(3, 1), **changes):
    return TensorSpec(dtype, shape, strides, 0, 0, **changes)


def call_of(signature="aten::relu", *inputs, outputs=()):
    inputs = inputs or (spec(),)
    return OpCall(0, "call", signature, dict(enumerate(inputs)), inputs, outputs or inputs, inputs)


def kernel(name="plain", signature="aten::relu", **changes):
    return KernelDescriptor(signature, name, **changes)


def registry_of(*kernels, resolver=None):
    registry = KernelRegistry("toy", resolver)
    for each in kernels:
        registry.add(each)
    registry.freeze()
    return registry


def test_the_exact_signature_is_found_and_no_other():
    add = kernel("add", "aten::add.Tensor")
    registry = registry_of(kernel(), add)
    assert registry.find(call_of("aten::add.Tensor")) is add
    assert registry.has(call_of("aten::add.Tensor"))
    assert registry.signatures() == ["aten::add.Tensor", "aten::relu"]
    assert registry.kernels("aten::add.Tensor") == (add,)
    assert registry.kernels("aten::add") == ()
    for loose in ("aten::add", "aten::add.Scalar", "add.Tensor"):
        assert not registry.has(call_of(loose))
        with pytest.raises(KernelNotFoundError):
            registry.find(call_of(loose))


def test_other_namespaces_are_signatures_like_any():
    mine = kernel("mine", "mylib::fused_thing")
    assert registry_of(mine).find(call_of("mylib::fused_thing")) is mine


def test_the_highest_priority_that_accepts_wins():
    general = kernel("general")
    fast = kernel("fast", priority=5, contiguous=True)
    fastest = kernel("fastest", priority=9, dtypes=frozenset({"float64"}))
    registry = registry_of(general, fast, fastest)
    assert registry.find(call_of()) is fast
    assert registry.find(call_of("aten::relu", spec(strides=(1, 2)))) is general
    assert registry.find(call_of("aten::relu", spec(F64))) is fastest


def test_a_tie_is_an_error_that_names_both():
    registry = registry_of(
        kernel("low", priority=-1),
        kernel("one", origin="plugin a, line 3"),
        kernel("two", origin="plugin b"),
    )
    with pytest.raises(RegistryError) as caught:
        registry.find(call_of())
    assert "'one' (plugin a, line 3) and 'two' (plugin b)" in caught.value.message
    assert "'low'" not in caught.value.message
    assert "priority 0" in caught.value.message


def test_no_tie_when_only_one_of_them_accepts():
    only = kernel("two")
    registry = registry_of(kernel("one", dtypes=frozenset({"int64"})), only)
    assert registry.find(call_of()) is only


def test_one_name_twice_for_a_signature_is_refused():
    registry = KernelRegistry("toy")
    registry.add(kernel(origin="here"))
    registry.add(kernel(signature="aten::neg"))
    with pytest.raises(
        RegistryError, match=r"two kernels named 'plain' for aten::relu.*'toy'.*here.*unknown place"
    ):
        registry.add(kernel())
    assert len(registry.kernels("aten::relu")) == 1


def test_a_frozen_registry_takes_no_more_kernels():
    registry = registry_of(kernel())
    with pytest.raises(RegistryError, match=r"kernel 'late' for aten::relu comes too late.*'toy' is frozen"):
        registry.add(kernel("late"))
    assert registry.signatures() == ["aten::relu"]


# -- reasons


@pytest.mark.parametrize(
    ("changes", "came", "told"),
    [
        ({"dtypes": frozenset({"int64", "float32"})}, spec(F64), "takes float32, int64, not float64"),
        (
            {"contiguous": True},
            spec(strides=(1, 2)),
            "takes contiguous tensors, not f32[2, 3] with strides (1, 2)",
        ),
        ({}, spec(conj=True), "lazily conjugated or negated"),
        ({}, spec(neg=True), "such as -f32[2, 3]"),
    ],
)
def test_a_kernel_says_why_it_does_not_take_a_call(changes, came, told):
    fussy = kernel(**changes)
    assert refusal(fussy, call_of()) is None
    for inputs, outputs in (((spec(), came), (spec(),)), ((spec(),), (came,))):
        assert told in refusal(fussy, call_of("aten::relu", *inputs, outputs=outputs))


@pytest.mark.parametrize("bits", [{"conj": True}, {"neg": True}])
def test_a_kernel_that_reads_lazy_bits_takes_them(bits):
    assert refusal(kernel(lazy_bits=True), call_of("aten::relu", spec(**bits))) is None


def test_a_missing_kernel_says_what_came_and_every_refusal():
    registry = registry_of(
        kernel("ints", dtypes=frozenset({"int64"})),
        kernel("rows", contiguous=True),
        kernel("no", "aten::neg"),
    )
    with pytest.raises(KernelNotFoundError) as caught:
        registry.find(call_of("aten::relu", spec(strides=(1, 2))))
    told = caught.value.message
    assert "no kernel for aten::relu on 'toy'" in told
    assert "f32[2, 3] strides (1, 2)" in told
    assert "'ints' takes int64, not float32" in told
    assert "'rows' takes contiguous tensors" in told
    assert "'no'" not in told
    assert 'missing_kernel = "fallback"' in caught.value.hint


def test_a_missing_overload_says_which_overload_is_there():
    registry = registry_of(kernel("a", "aten::sub.Tensor"), kernel("b", "aten::add.Scalar"))
    with pytest.raises(KernelNotFoundError) as caught:
        registry.find(call_of("aten::add.Tensor"))
    assert "nearest registered signature is 'aten::add.Scalar'" in caught.value.hint


def test_a_misspelt_signature_says_the_nearest():
    with pytest.raises(KernelNotFoundError) as caught:
        registry_of(kernel()).find(call_of("aten::relo"))
    assert "'aten::relu'" in caught.value.hint


def test_an_empty_registry_finds_nothing():
    with pytest.raises(KernelNotFoundError, match="what came: no tensors") as caught:
        registry_of().find(OpCall(0, "rand", "aten::rand", {}, (), (), ()))
    assert "nearest" not in caught.value.hint


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
    assert registry.find(call_of()) is library.made
    assert registry.has(call_of("aten::relu", spec(F64)))
    assert not registry.has(call_of("aten::sin"))
    with pytest.raises(KernelNotFoundError):
        registry.find(call_of("aten::sin"))
    assert library.asked == ["aten::relu", "aten::sin"]
    assert registry.signatures() == ["aten::neg"]


def test_an_added_kernel_outranks_the_resolver_where_it_accepts():
    library = Library()
    own = kernel("own", contiguous=True, priority=-5)
    registry = registry_of(own, resolver=library)
    assert registry.find(call_of()) is own
    assert library.asked == []
    assert registry.find(call_of("aten::relu", spec(strides=(1, 2)))) is library.made


def test_what_a_resolver_gives_is_checked_like_any_kernel():
    registry = registry_of(resolver=Library(dtypes=frozenset({"float32"})))
    assert registry.has(call_of())
    doubles = call_of("aten::relu", spec(F64))
    assert not registry.has(doubles)
    with pytest.raises(KernelNotFoundError, match="'library' takes float32, not float64"):
        registry.find(doubles)


def test_many_threads_ask_a_resolver_once():
    library = Library(delay=0.05)
    registry = registry_of(resolver=library)
    found = []
    start = threading.Barrier(8)

    def find():
        start.wait()
        found.append(registry.find(call_of()))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [library.made] * 8
    assert library.asked == ["aten::relu"]
