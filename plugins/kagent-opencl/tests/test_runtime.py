"""Memory, launches and the program cache of an OpenCL device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.kernels import override
from kagent_core.layout import CONTIGUOUS
from kagent_core.session import session_for
from kagent_opencl.platforms import list_devices
from kagent_opencl.runtime import OpenClRuntime

SCALE = """
__kernel void scale(__global const float *self_buffer, long self_first, __global float *out_buffer, long out_first,
                    long numel) {
    for (long i = get_global_id(0); i < numel; i += get_global_size(0))
        out_buffer[out_first + i] = 10 * self_buffer[self_first + i];
}
"""


@pytest.fixture
def runtime(device: str, tmp_path: Path) -> OpenClRuntime:
    [info] = [info for info in list_devices() if str(info.device) == device]
    return OpenClRuntime(info, load_config({"cache_dir": str(tmp_path)}))


def test_more_memory_than_there_is(runtime: OpenClRuntime) -> None:
    with pytest.raises(MemoryError, match="bytes wanted"):
        runtime.allocate(2**50)
    runtime.free(runtime.allocate(0))


def test_a_buffer_on_host_memory_is_that_memory(runtime: OpenClRuntime) -> None:
    if not runtime.imports_host:
        pytest.skip("this device has memory of its own")
    host = torch.arange(8.0)
    buffer = runtime.import_host(host.data_ptr(), host.nbytes)
    host[3] = 42
    seen = bytearray(host.nbytes)
    runtime.copy_out(buffer, 0, memoryview(seen))
    assert torch.frombuffer(seen, dtype=torch.float32).tolist() == [0, 1, 2, 42, 4, 5, 6, 7]
    runtime.copy_in(buffer, 4, memoryview(bytes(4)))
    runtime.synchronize()
    assert host[1] == 0
    runtime.free(buffer)
    assert host[3] == 42


@pytest.mark.parametrize("how", ["in place", "through data", "swapped", "new storage"])
def test_a_parameter_that_changed_is_seen(device: str, how: str) -> None:
    linear = torch.nn.Linear(4, 4)
    compiled = kagent_core.compile(linear, device=device)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), linear(x))
        if how == "in place":
            linear.weight.add_(1)
        elif how == "through data":
            linear.weight.data[1, 2] = 7
        elif how == "swapped":
            linear.weight = torch.nn.Parameter(torch.randn(4, 4))
        else:
            linear.weight.data = torch.randn(4, 4)
        gc.collect()
        torch.testing.assert_close(compiled(x), linear(x))


def test_inputs_come_and_go(device: str) -> None:
    compiled = kagent_core.compile(lambda x: x * 2 + 1, device=device)
    for n in range(50):
        x = torch.full((1000,), float(n))
        torch.testing.assert_close(compiled(x), x * 2 + 1)


def test_an_argument_that_is_written(device: str) -> None:
    x, y = torch.zeros(6), torch.arange(6.0)
    compiled = kagent_core.compile(lambda a, b: a[1:4].add_(b[2:5]), device=device)
    for _ in range(3):
        compiled(x, y)
    assert x.tolist() == [0, 6, 9, 12, 0, 0]


def test_a_kernel_of_a_program(device: str) -> None:
    prototype = "void scale(const float *self, float *out, long numel)"
    with override(
        "aten::relu", device=device, source=SCALE, prototype=prototype, dtypes={"float32"}, layout=CONTIGUOUS
    ):
        x = torch.randn(100)[1:]
        torch.testing.assert_close(kagent_core.run_op("aten::relu", x, device=device), 10 * x)


def test_a_source_that_the_compiler_refuses(device: str) -> None:
    prototype = "void bad(const float *self, float *out)"
    source = "__kernel void bad(__global const float *x) { y = 1; }"
    with (
        override("aten::relu", device=device, source=source, prototype=prototype),
        pytest.raises(KagentError, match="undeclared identifier 'y'"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(2), device=device)


def test_a_second_process_compiles_nothing(device: str, tmp_path: Path) -> None:
    program = f"""
import types
import pyopencl, torch, kagent_core
from kagent_opencl import programs
class Counted(pyopencl.Program):
    sources = 0
    def __init__(self, *args):
        Counted.sources += isinstance(args[1], str)
        super().__init__(*args)
programs.cl = types.SimpleNamespace(**vars(pyopencl) | {{"Program": Counted}})
compiled = kagent_core.compile(lambda x: x.softmax(-1) @ x, device={device!r}, cache_dir={str(tmp_path)!r})
x = torch.randn(5, 5)
torch.testing.assert_close(compiled(x), x.softmax(-1) @ x)
print(Counted.sources, "compiled")
"""

    def compiled() -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert compiled() == "2 compiled"
    assert compiled() == "0 compiled"
    for path in (tmp_path / "opencl").rglob("*.bin"):
        path.write_bytes(path.read_bytes()[:-1])
    assert compiled() == "2 compiled"


def test_a_whole_model_without_a_fallback(device: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 16), layer, torch.nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = kagent_core.compile(model, device=device)
    session_for(load_config({"device": device})).reports.clear()
    tokens = torch.randint(0, 10, (3, 7))
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-4)
    for _ in range(2):
        results = []
        for run in (model, compiled):
            optimizer.zero_grad()
            run(tokens).square().mean().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
        optimizer.step()
    reports = session_for(load_config({"device": device})).reports
    assert len(reports) == 3
    assert [report.fallbacks for report in reports if report.fallbacks] == []


TWO_DEVICES = """
import torch, kagent_core
from kagent_opencl.platforms import list_devices
mine = [str(info.device) for info in list_devices() if info.available]
x = torch.randn(64)
for name in mine:
    torch.testing.assert_close(kagent_core.compile(lambda x: x.exp() + 1, device=name)(x), x.exp() + 1)
options = {"placement": {"aten::exp": mine[1]}}
both = kagent_core.compile(lambda x: x.exp() * x, device=mine[0], **options)
torch.testing.assert_close(both(x), x.exp() * x)
print(len(mine))
"""


def test_two_devices_at_once(device: str) -> None:
    environment = {**os.environ, "POCL_DEVICES": "pthread basic"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
