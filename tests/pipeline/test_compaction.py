"""Tensors that a kernel does not take as they lie: copied into scratch and back, counted, told, or refused."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core.errors import KernelNotFoundError
from kagent_core.layout import CHANNELS_LAST, CONTIGUOUS
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.compare import copy_arguments
from kagent_core.testing.fake import FakeDevice


def double(x, out):
    assert x.is_contiguous(), "the kernel was given what it does not take"
    assert out.is_contiguous()
    torch.mul(x, 2, out=out)


def double_in_place(x, factor):
    assert x.is_contiguous()
    x.mul_(factor)


def pick(x, out):
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.neg(x, out=out)


def clone(x, out):
    out.copy_(x)


CONTIGUOUS_ONLY = (
    KernelDescriptor("aten::exp", "contiguous_double", double, layout=CONTIGUOUS),
    KernelDescriptor("aten::mul_.Tensor", "contiguous_mul_", double_in_place, layout=CONTIGUOUS),
    KernelDescriptor("aten::neg", "channels_last_neg", pick, layouts={"self": CHANNELS_LAST}),
)
COPIES = (KernelDescriptor("aten::clone", "strided_clone", clone),)


@pytest.fixture
def fake():
    with kagent_core.use_plugin(FakeDevice(kernels=(*CONTIGUOUS_ONLY, *COPIES))) as _:
        yield


def report():
    return kagent_core.session_for(kagent_core.load_config(options={"device": "fake:0"})).reports[-1]


LAYOUTS = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "every other": lambda: torch.randn(4, 8)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 5),
    "offset": lambda: torch.randn(40)[7:27].view(5, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_and_strides_equal_eager(fake, layout):
    x = LAYOUTS[layout]()
    got = kagent_core.run_op("aten::exp", x, device="fake:0")
    want = torch.exp(x)
    torch.testing.assert_close(got, 2 * x)
    assert got.stride() == want.stride()
    assert report().fallbacks == ()
    assert report().compactions >= 1


def test_nothing_is_copied_without_need(fake):
    kagent_core.run_op("aten::exp", torch.randn(3, 4), device="fake:0")
    assert (report().compactions, report().compacted_nbytes) == (0, 0)


def test_only_what_must_be_is_copied(fake):
    x = torch.randn(4, 8)[:, ::2]
    kagent_core.run_op("aten::exp", x, device="fake:0")
    assert report().compactions == 1  # eager's result is contiguous: it is written where it belongs
    assert report().compacted_nbytes == 4 * 4 * 4


def test_a_written_argument_is_written_back(fake):
    base = torch.randn(4, 8)
    twin = base.clone()
    kagent_core.run_op("aten::mul_.Tensor", base[:, ::2], 3, device="fake:0")
    twin[:, ::2].mul_(3)
    torch.testing.assert_close(base, twin)


def test_a_channels_last_kernel(fake):
    x = torch.randn(2, 3, 4, 5)
    got = kagent_core.run_op("aten::neg", x, device="fake:0")
    torch.testing.assert_close(got, -x)
    assert got.stride() == (-x).stride()
    kagent_core.run_op("aten::neg", x.to(memory_format=torch.channels_last), device="fake:0")
    assert report().compactions == 0


def test_one_copy_for_several_readers_until_it_is_written(fake):
    def function(x):
        y = x.t()
        return torch.exp(y), torch.exp(y), x.mul_(2), torch.exp(y)

    x = torch.randn(3, 4)
    with torch.no_grad():
        got = kagent_core.compile(function, device="fake:0")(mine := x.clone())
    torch.testing.assert_close(got[0], 2 * x.t())
    torch.testing.assert_close(got[3], 4 * x.t())
    torch.testing.assert_close(mine, 2 * x)


def test_it_is_told(fake, caplog):
    with caplog.at_level(logging.INFO, logger="kagent"):
        kagent_core.run_op("aten::exp", torch.randn(3, 4).t(), device="fake:0")
    assert "copies of 96 bytes for kernels' layouts" in caplog.text
    assert "compacts 'self' of exp (48 bytes)" in caplog.text


def test_config_can_forbid_it(fake):
    options = {"device": "fake:0", "compaction": False, "missing_kernel": "error"}
    compiled = kagent_core.compile(lambda x: torch.exp(x), **options)
    with pytest.raises(KernelNotFoundError, match="takes contiguous tensors"):
        compiled(torch.randn(3, 4).t())


def test_a_device_without_copy_kernels_falls_back_or_refuses(caplog):
    x = torch.randn(3, 4).t()
    with kagent_core.use_plugin(FakeDevice(kernels=CONTIGUOUS_ONLY)):
        with caplog.at_level(logging.WARNING, logger="kagent"):
            torch.testing.assert_close(kagent_core.run_op("aten::exp", x, device="fake:0"), torch.exp(x))
        assert "do not run on fake:0" in caplog.text
        with pytest.raises(KernelNotFoundError):
            kagent_core.compile(lambda x: torch.exp(x), device="fake:0", missing_kernel="error")(x)


@settings(max_examples=100, deadline=None)
@given(
    st.permutations(range(3)),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_any_strides(order, shape, steps):
    base = torch.randn([size * step for size, step in zip(shape, steps, strict=True)])
    x = base[:: steps[0], :: steps[1], :: steps[2]].permute(order)
    with kagent_core.use_plugin(FakeDevice(kernels=(*CONTIGUOUS_ONLY, *COPIES))):
        got = kagent_core.run_op("aten::exp", *copy_arguments([x]), device="fake:0")
    torch.testing.assert_close(got, 2 * x)
    for size, mine, theirs in zip(x.shape, got.stride(), torch.exp(x).stride(), strict=True):
        assert size == 1 or mine == theirs  # meta kernels do not tell the strides of dimensions of size 1
