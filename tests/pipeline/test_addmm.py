"""A hand-written addmm in 16×16 tiles on the fake device, from the operator's call to its result."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core import hookimpl
from kagent_core.errors import KernelNotFoundError, PackingError
from kagent_core.layout import ANY_STRIDES
from kagent_core.registry import KernelRegistry
from kagent_core.specs import KernelDescriptor, LaunchConfig
from kagent_core.testing.fake import POISON, FakeDevice, FakeRuntime
from kagent_core.testing.tiled import tiled_addmm, tiled_addmm_kernel

ONLY = {"missing_kernel": "error"}


class Bare(FakeDevice):
    """A fake device with the kernels that it is given, and none of its own."""

    @hookimpl
    def kagent_kernel_registry(self, info, config):
        if info.device.type != "fake":
            return None
        registry = KernelRegistry("fake")
        for kernel in self._kernels:
            registry.add(kernel)
        return registry


class Watched:
    """The tiled kernel, with what it was given."""

    def __init__(self):
        self.configs = []
        self.scalars = []
        self.descriptor = replace(tiled_addmm_kernel(), function=self.run)

    def run(self, bias, mat1, mat2, out, *scalars, config):
        self.configs.append(config)
        self.scalars.append(scalars)
        tiled_addmm(bias, mat1, mat2, out, *scalars, config=config)


def clone(x, out):
    out.copy_(x)


CLONE = KernelDescriptor("aten::clone", "clone", clone)


def integers(*shape):
    """Small whole numbers: sums and products of them are exact, so that results are compared bit by bit."""
    return torch.randint(-8, 9, shape).float()


def addmm(bias, x, w, **scalars):
    return kagent_core.run_op("aten::addmm", bias, x, w, device="fake:0", **scalars)


def exact(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, check_stride=True)


def report(**options):
    return kagent_core.session_for(kagent_core.load_config(options={"device": "fake:0", **options})).reports[-1]


@pytest.fixture
def device():
    """Only the tiled kernel, so that nothing else can give the right result."""
    device = Bare(kernels=[tiled_addmm_kernel()])
    with kagent_core.use_plugin(device):
        yield device


BIASES = {
    "row": lambda m, n: integers(n),
    "matrix": integers,
    "one row": lambda m, n: integers(1, n),
    "one column": lambda m, n: integers(m, 1),
    "one element": lambda m, n: integers(1),
    "no dimension": lambda m, n: integers(),
    "expanded rows": lambda m, n: integers(n).expand(m, n),
    "expanded columns": lambda m, n: integers(m, 1).expand(m, n),
    "transposed": lambda m, n: integers(n, m).t(),
    "every other": lambda m, n: integers(m, 2 * n)[:, ::2],
    "with an offset": lambda m, n: integers(3 + n)[3:],
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 5, 7), (16, 32, 16), (1, 1, 1), (17, 16, 31), (2, 40, 1)])
def test_results_equal_eager(device, bias, m, n, k):
    bias, x, w = BIASES[bias](m, n), integers(m, k), integers(k, n)
    exact(addmm(bias, x, w), torch.addmm(bias, x, w))
    assert device.runtime.launches == ["tiled_addmm"]
    assert report().fallbacks == ()
    assert report().compactions == 0


@pytest.mark.parametrize(
    "scalars",
    [{}, {"beta": 2}, {"alpha": -3}, {"beta": 0.5, "alpha": 2}, {"beta": 0}, {"alpha": 0}, {"beta": 0, "alpha": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("k", [7, 0])
def test_scalars(device, scalars, k):
    bias, x, w = integers(5), integers(33, k), integers(k, 5)
    exact(addmm(bias, x, w, **scalars), torch.addmm(bias, x, w, **scalars))


def test_scalars_are_rounded_once():
    watched = Watched()
    with kagent_core.use_plugin(Bare(kernels=[watched.descriptor])):
        bias, x, w = torch.randn(5), torch.randn(33, 7), torch.randn(7, 5)
        got = addmm(bias, x, w, beta=0.1, alpha=1 / 3)
    torch.testing.assert_close(got, torch.addmm(bias, x, w, beta=0.1, alpha=1 / 3))
    rounded = torch.tensor([0.1, 1 / 3]).tolist()
    assert watched.scalars == [(33, 5, 7, 0, 1, *rounded)]


@pytest.mark.parametrize("scalars", [{"beta": 0}, {"beta": 0.0}, {"alpha": 0}], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_multiplied_by_zero_does_not_count(device, scalars, bad):
    bias, x, w = integers(5), integers(33, 7), integers(7, 5)
    (bias if "beta" in scalars else x).fill_(bad)
    got = addmm(bias, x, w, **scalars)
    assert got.isfinite().all()
    exact(got, torch.addmm(bias, x, w, **scalars))


@pytest.mark.parametrize("where", range(3))
def test_nan_spreads_as_in_eager(device, where):
    tensors = [integers(33, 5), integers(33, 18), integers(18, 5)]
    tensors[where][-1, -1] = torch.nan
    want = torch.addmm(*tensors)
    assert want.isnan().any()
    assert not want.isnan().all()
    torch.testing.assert_close(addmm(*tensors), want, rtol=0, atol=0, equal_nan=True)


def test_without_a_product_the_bias_is_the_result(device):
    bias = integers(5)
    exact(addmm(bias, torch.empty(3, 0), torch.empty(0, 5), beta=2), (2 * bias).expand(3, 5).contiguous())


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_a_result_without_elements_is_not_launched(device, m, n):
    bias, x, w = integers(n), integers(m, 7), integers(7, n)
    exact(addmm(bias, x, w), torch.addmm(bias, x, w))
    assert device.runtime.launches == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(sorted(BIASES)),
    st.sampled_from([0, 1, 2.5, -1]),
    st.sampled_from([0, 1, 0.5, -2]),
)
def test_any_problem(m, n, k, bias, beta, alpha):
    bias, x, w = BIASES[bias](m, n), integers(m, k), integers(k, n)
    with kagent_core.use_plugin(Bare(kernels=[tiled_addmm_kernel()])):
        exact(addmm(bias, x, w, beta=beta, alpha=alpha), torch.addmm(bias, x, w, beta=beta, alpha=alpha))


# -- the launch config


@pytest.mark.parametrize(
    ("m", "n", "grid"),
    [(33, 5, (1, 3, 1)), (5, 33, (3, 1, 1)), (16, 16, (1, 1, 1)), (17, 48, (3, 2, 1)), (1, 1, (1, 1, 1))],
)
def test_a_block_of_256_threads_per_tile(m, n, grid):
    watched = Watched()
    with kagent_core.use_plugin(Bare(kernels=[watched.descriptor])):
        addmm(integers(n), integers(m, 7), integers(7, n))
    assert watched.configs == [LaunchConfig(grid, (16, 16, 1))]


@pytest.mark.parametrize(("grid", "rows", "columns"), [((1, 1, 1), 16, 16), ((1, 3, 1), 33, 16), ((2, 2, 1), 32, 20)])
def test_a_grid_that_is_too_small_leaves_poison(device, grid, rows, columns):
    bias, x, w = integers(20), integers(33, 7), integers(7, 20)
    with kagent_core.force_launch_config("tiled_addmm", LaunchConfig(grid, (16, 16, 1))):
        got = addmm(bias, x, w)
    want = torch.addmm(bias, x, w)
    exact(got[:rows, :columns].contiguous(), want[:rows, :columns].contiguous())
    touched = torch.zeros(33, 20, dtype=torch.bool)
    touched[:rows, :columns] = True
    assert (got[~touched].view(torch.uint8) == POISON).all()
    assert (~touched).any()
    exact(addmm(bias, x, w), want)  # without the forced one, the next call is whole


@pytest.mark.parametrize(
    "config",
    [LaunchConfig((4, 5, 1), (8, 8, 1)), LaunchConfig((1, 1, 1), (32, 32, 1)), LaunchConfig((9, 9, 1), (5, 4, 1))],
    ids=str,
)
def test_any_grid_that_covers_the_result_is_right(device, config):
    """Blocks that lie outside of the result, in whole or in part, touch nothing."""
    bias, x, w = integers(20), integers(32, 19), integers(19, 20)
    with kagent_core.force_launch_config("aten::addmm", config):
        exact(addmm(bias, x, w), torch.addmm(bias, x, w))


def test_a_kernel_that_asks_for_its_config_is_looked_at_when_it_is_loaded(monkeypatch):
    looked = []
    original = inspect.signature
    watched = Watched()

    def signature(function):
        looked.append(function)
        return original(function)

    with kagent_core.use_plugin(Bare(kernels=[watched.descriptor])):
        compiled = kagent_core.compile(torch.addmm, device="fake:0")
        arguments = integers(5), integers(33, 7), integers(7, 5)
        monkeypatch.setattr(inspect, "signature", signature)
        for _ in range(3):
            exact(compiled(*arguments), torch.addmm(*arguments))
    assert len(watched.configs) == 3
    assert looked.count(watched.run) == 1


def test_a_kernel_that_does_not_ask_gets_no_config():
    def relu(x, out, config="mine"):
        assert config == "mine"
        torch.clamp(x, min=0, out=out)

    class Opaque:
        __signature__ = "not one"

        def __call__(self, x, out):
            torch.clamp(x, min=0, out=out)

    x = integers(3, 4)
    for function in (relu, Opaque()):
        with kagent_core.use_plugin(Bare(kernels=[KernelDescriptor("aten::relu", "relu", function)])):
            exact(kagent_core.run_op("aten::relu", x, device="fake:0"), x.relu())


# -- layouts and dtypes


def test_a_transposed_matrix_goes_to_a_variant_that_takes_it():
    device = FakeDevice(kernels=[tiled_addmm_kernel(), CLONE])
    bias, x, w = integers(5), integers(33, 7), integers(5, 7).t()
    with kagent_core.use_plugin(device):
        for mat2 in (w.contiguous(), w):
            exact(addmm(bias, x, mat2), torch.addmm(bias, x, w))
            assert report().compactions == 0
    assert device.runtime.launches == ["tiled_addmm", "fake__addmm"]


TRANSPOSED = {
    "mat2": (lambda: (integers(33, 7), integers(5, 7).t()), 1, 7 * 5 * 4),
    "mat1": (lambda: (integers(7, 33).t(), integers(7, 5)), 1, 33 * 7 * 4),
    "both": (lambda: (integers(7, 33).t(), integers(5, 7).t()), 2, (33 + 5) * 7 * 4),
    "every other": (lambda: (integers(33, 14)[:, ::2], integers(7, 5)), 1, 33 * 7 * 4),
}


@pytest.mark.parametrize("which", TRANSPOSED)
def test_without_such_a_variant_it_is_compacted(which):
    make, copies, nbytes = TRANSPOSED[which]
    device = Bare(kernels=[tiled_addmm_kernel(), CLONE], runtime=FakeRuntime(streams=2, delay_ms=1))
    bias, (x, w) = integers(5), make()
    with kagent_core.use_plugin(device):
        exact(addmm(bias, x, w), torch.addmm(bias, x, w))
        assert (report().compactions, report().compacted_nbytes) == (copies, nbytes)
    assert device.runtime.launches == [*["clone"] * copies, "tiled_addmm"]


def test_compaction_can_be_forbidden():
    with kagent_core.use_plugin(Bare(kernels=[tiled_addmm_kernel(), CLONE])):
        compiled = kagent_core.compile(torch.addmm, device="fake:0", compaction=False, **ONLY)
        with pytest.raises(KernelNotFoundError, match="addmm") as caught:
            compiled(integers(5), integers(33, 7), integers(5, 7).t())
    assert "takes contiguous tensors, not f32[7, 5] with strides (1, 7)" in str(caught.value)


def test_linear_layers_on_streams():
    device = Bare(kernels=[tiled_addmm_kernel(), CLONE], runtime=FakeRuntime(streams=2, delay_ms=1))
    model = torch.nn.Sequential(torch.nn.Linear(7, 20), torch.nn.Linear(20, 18), torch.nn.Linear(18, 3))
    with kagent_core.use_plugin(device), torch.no_grad():
        compiled = kagent_core.compile(model, device="fake:0", **ONLY)
        for _ in range(3):
            x = torch.randn(33, 7)
            torch.testing.assert_close(compiled(x), model(x))
    assert device.runtime.launches.count("tiled_addmm") == 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_another_dtype_is_told_with_the_near_miss(device, dtype):
    bias, x, w = (tensor.to(dtype) for tensor in (integers(5), integers(33, 7), integers(7, 5)))
    compiled = kagent_core.compile(torch.addmm, device="fake:0", **ONLY)
    with pytest.raises(KernelNotFoundError, match="no kernel for aten::addmm on 'fake' takes what came") as caught:
        compiled(bias, x, w)
    assert f"takes float32, not {str(dtype).removeprefix('torch.')}" in str(caught.value)
    assert "tiled_addmm" in str(caught.value)
    assert device.runtime.launches == []


def test_another_dtype_falls_back_with_the_reason(device):
    bias, x, w = integers(5).double(), integers(33, 7).double(), integers(7, 5).double()
    exact(addmm(bias, x, w), torch.addmm(bias, x, w))
    [fallback] = report().fallbacks
    assert (fallback.signature, fallback.device) == ("aten::addmm", "cpu")
    assert device.runtime.launches == []


def test_another_dtype_that_the_registry_lets_through_stops_at_the_packer():
    """A float64 tensor never reaches a ``const float*``, whatever the kernel says that it accepts."""
    careless = replace(tiled_addmm_kernel(), dtypes=None, layout=ANY_STRIDES)
    device = Bare(kernels=[careless])
    with kagent_core.use_plugin(device), pytest.raises(PackingError) as caught:
        addmm(integers(5).double(), integers(33, 7).double(), integers(7, 5).double())
    assert str(caught.value).startswith(
        "parameter 'self' of kernel 'tiled_addmm' for aten::addmm is a const float* and takes a tensor of float32, "
        "not the float64 tensor f64[5]"
    )
    assert device.runtime.launches == []


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"alpha": 1e39}, "parameter 'alpha' .* is a float, in which 1e\\+39 would become infinite"),
        ({"beta": 1j}, "parameter 'beta' .* is a float and takes a real number, not the complex 1j"),
    ],
    ids=str,
)
def test_a_scalar_that_does_not_fit_is_told_before_any_launch(device, scalars, message):
    with pytest.raises(PackingError, match=message):
        addmm(integers(5), integers(33, 7), integers(7, 5), **scalars)
    assert device.runtime.launches == []
