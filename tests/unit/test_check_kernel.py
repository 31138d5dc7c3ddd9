"""``kagent check-kernel``: right kernels are said to be right, planted mistakes are found and shown."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kagent_core.bench import one_kernel
from kagent_core.cli import app
from kagent_core.cli.output import print_error
from kagent_core.errors import KagentError
from kagent_core.kernels import active_kernels

LOOP = "for (int64_t i = 0; i < numel; i++)"
HEAD = "void {name}(const float *self, float *out, int64_t numel)"


def pointwise(name: str, expression: str, loop: str = LOOP) -> str:
    return f"#include <math.h>\n{HEAD.format(name=name)}\n{{\n    {loop} out[i] = {expression};\n}}\n"


RELU = pointwise("my_relu", "self[i] < 0 ? 0 : self[i]")
MATMUL = """
void my_mm(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k,
           int64_t a0, int64_t a1, int64_t b0, int64_t b1) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++) sum += a[i * a0 + l * a1] * b[l * b0 + j * b1];
            c[i * n + j] = sum;
        }
}
"""
MATMUL_PROTOTYPE = (
    "void my_mm(const float *self, const float *mat2, float *out, int64_t self_size0, int64_t mat2_size1, "
    "int64_t self_size1, int64_t self_stride0, int64_t self_stride1, int64_t mat2_stride0, int64_t mat2_stride1)"
)
SUM_LAST = """
void sum_last(const float *self, float *out, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < columns; j++) sum += self[i * columns + j];
        out[i] = sum;
    }
}
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [*os.environ]:
        if name.upper().startswith("KAGENT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGENT_CONFIG", os.devnull)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    yield
    assert not active_kernels(), "the command left a kernel registered"


class Result:
    """What a command printed, and its exit code."""

    def __init__(self, arguments: list[str]) -> None:
        done = CliRunner().invoke(app, ["check-kernel", *arguments])
        self.code, self.output = done.exit_code, done.output

    @property
    def json(self) -> Any:
        return json.loads(self.output)


def check(*arguments: str) -> Result:
    return Result([*arguments])


def check_source(source: str, signature: str, *arguments: str, name: str = "kernel.c") -> Result:
    Path(name).write_text(source)
    return check(name, "--signature", signature, "--device", "cpu", "--no-time", *arguments)


def only(result: Result) -> Any:
    [kernel] = result.json["kernels"]
    return kernel


def check_script(text: str, *arguments: str) -> Result:
    Path("kernels.py").write_text("import kagent_core\nfrom kagent_core.layout import ANY_STRIDES\n" + text)
    return check("kernels.py", "--no-time", *arguments)


def registered(signature: str, source: str, **fields: Any) -> str:
    told = "".join(f", {name}={value}" for name, value in fields.items())
    return f"kagent_core.kernel({signature!r}, device='cpu', source={source!r}{told})\n"


# -- right kernels


def test_a_right_kernel_is_told_in_words() -> None:
    result = check_source(RELU, "aten::relu")
    assert result.code == 0
    lines = result.output.splitlines()
    assert lines[0] == "my_relu for aten::relu on cpu, kernel.c"
    assert "  equal to eager PyTorch: all of them" in lines
    assert any(line.endswith("takes float32, not float64") for line in lines)
    assert any(line.endswith("takes contiguous tensors") for line in lines)


def test_right_kernels_of_several_kinds() -> None:
    script = registered("aten::relu", RELU)
    script += registered("aten::mm", MATMUL, prototype=repr(MATMUL_PROTOTYPE), layout="ANY_STRIDES")
    script += registered(
        "aten::sum.dim_IntList",
        SUM_LAST,
        derived={"rows": "prod(self.shape[:-1])", "columns": "self.shape[-1]"},
        only={"dim": (-1,), "dtype": None},
        ignore=["keepdim"],
    )
    script += registered(
        "aten::relu_",
        "void relu_(float *self, int64_t self_numel) {"
        " for (int64_t i = 0; i < self_numel; i++) if (self[i] < 0) self[i] = 0; }",
    )
    script += "@kagent_core.kernel('aten::neg', device='cpu', dtypes={'float32'})\ndef negate(x):\n    return -1 * x\n"
    result = check_script(script, "--json")
    found = {kernel["name"]: kernel for kernel in result.json["kernels"]}
    assert [name for name, kernel in found.items() if not kernel["right"]] == []
    assert result.code == 0
    assert "is right only for dim=(-1,), not (0,)" in found["sum_last"]["refused"]
    assert found["my_mm"]["taken"] > 20
    assert found["my_mm"]["refused"].keys() == {"takes float32, not float64", "takes float32, not int64"}
    assert found["relu_"]["taken"] > 5
    assert found["negate"]["taken"] > 3


def test_a_reduction_with_a_number_for_the_dimension() -> None:
    source = SUM_LAST.replace("sum_last", "sum_all").replace("int64_t rows, int64_t columns", "int64_t self_numel")
    source = source.replace("i < rows", "i < 1").replace("columns", "self_numel")
    result = check_source(source, "aten::sum", "--json")
    assert only(result)["right"]
    assert result.code == 0


def test_what_a_kernel_computes_more_exactly_than_eager_is_right() -> None:
    result = check_source(
        pointwise("my_gelu", "0.5 * self[i] * (1 + erf(self[i] * M_SQRT1_2))"), "aten::gelu", "--json"
    )
    found = only(result)
    assert found["right"], found["first_wrong"]
    assert "is right only for approximate='none', not 'tanh'" in found["refused"]


def test_only_as_many_samples_as_asked_for() -> None:
    few, many = (only(check_source(RELU, "aten::relu", "--json", "--samples", n)) for n in ("1", "6"))
    assert few["samples"] < many["samples"]


def test_an_operator_that_is_taken_apart_is_told() -> None:
    result = check_source(pointwise("my_silu", "self[i] / (1 + expf(-self[i]))"), "aten::silu")
    assert "torch.compile takes aten::silu apart" in " ".join(result.output.split())


# -- wrong ones


def test_a_wrong_kernel_is_shown() -> None:
    result = check_source(pointwise("last_left_out", "-self[i]", LOOP.replace("numel", "numel - 1")), "aten::neg")
    assert result.code == 1
    lines = [line.rstrip() for line in result.output.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.endswith("The first that does not:"))
    assert lines[first + 1] == "    sample 0 of 'neg' in float32, as it came"
    assert lines[first + 2] == "    1 of 400 elements are wrong, the first one is [19, 19]:"
    assert lines[first + 3].startswith("      expected ")
    assert lines[first + 4] == "      got      nan"
    assert lines[first + 5 :][:5] == [
        "    called with:",
        "      self   const float*  f32[20, 20] strides (20, 1) offset 0, in",
        "      out    float*        f32[20, 20] strides (20, 1) offset 0, out",
        "      numel  int64_t       400",
        "    launch config: grid (1, 1, 1) x block (1, 1, 1)",
    ]


def test_a_stride_that_is_ignored() -> None:
    script = registered("aten::abs", pointwise("flat", "fabsf(self[i])"), layout="ANY_STRIDES")
    found = only(check_script(script, "--json"))
    assert found["wrong"] >= 2
    assert found["first_wrong"]["call"].endswith("every second element")
    assert found["first_wrong"]["index"] == [0, 1]
    assert found["first_wrong"]["arguments"][0] == {
        "name": "self",
        "type": "const float*",
        "value": "f32[20, 20] strides (40, 2) offset 0, in",
    }


def test_nan_that_is_ignored() -> None:
    found = only(check_source(pointwise("clamps", "self[i] > 0 ? self[i] : 0"), "aten::relu", "--json"))
    assert found["first_wrong"]["call"].endswith("NaN and infinities")
    assert (found["first_wrong"]["expected"], found["first_wrong"]["got"]) == ("nan", "0.0")


def test_numbers_in_the_wrong_order() -> None:
    swapped = MATMUL_PROTOTYPE.replace(
        "int64_t self_size0, int64_t mat2_size1", "int64_t mat2_size1, int64_t self_size0"
    )
    script = registered("aten::mm", MATMUL, prototype=repr(swapped), layout="ANY_STRIDES")
    found = only(check_script(script, "--json"))
    assert found["wrong"]
    assert "with 4 in place of 5 in dimension 0" in found["first_wrong"]["call"]
    names = [argument["name"] for argument in found["first_wrong"]["arguments"]]
    assert names[3:5] == ["mat2_size1", "self_size0"]


def test_a_number_of_the_wrong_type() -> None:
    source = pointwise("leaky", "self[i] > 0 ? self[i] : self[i] * slope").replace("numel)", "numel, int slope)")
    found = only(check_source(source, "aten::leaky_relu", "--derived", "slope=int(negative_slope)", "--json"))
    assert found["wrong"]
    assert found["first_wrong"]["arguments"][3] == {"name": "slope", "type": "int32_t", "value": "0"}


def test_a_pointer_of_the_wrong_dtype() -> None:
    source = pointwise("bits", "fabsf(((const float *)self)[i])").replace("const float *self", "const void *self")
    script = registered("aten::abs", source.replace("float *out", "void *out").replace("out[i]", "((float *)out)[i]"))
    script = script.replace("device=", "dtypes={'float32', 'int32'}, device=")
    found = only(check_script(script, "--json"))
    assert "in int32" in found["first_wrong"]["call"]
    double = pointwise("my_tan", "tan(self[i])").replace("float", "double")
    script = registered("aten::tan", double, dtypes={"float32"})
    found = only(check_script(script, "--json"))
    assert (found["taken"], found["right"]) == (0, False)
    assert "takes float64 as 'self', not float32" in found["refused"]


def test_memory_behind_an_argument_that_is_written() -> None:
    source = (
        "void relu_(float *self, int64_t self_numel) { if (self_numel)"
        " for (int64_t i = 0; i <= self_numel; i++) self[i] = self[i] > 0 ? self[i] : 0; }"
    )
    found = only(check_source(source, "aten::relu_", "--json"))
    assert found["first_wrong"]["difference"].endswith("memory before or behind a tensor was written")
    assert found["first_wrong"]["index"] is None


def test_an_error_of_the_packer_is_counted() -> None:
    found = only(
        check_source(RELU.replace("int64_t numel", "int64_t numel, int64_t self_size1"), "aten::relu", "--json")
    )
    assert any("has no value here" in message for message in found["errors"])


def test_text_that_does_not_compile() -> None:
    result = check_source(RELU.replace("self[i]", "slef[i]"), "aten::relu")
    assert result.code == 1
    assert "broken: kernel 'my_relu' for aten::relu (kernel.c) does not compile:" in result.output
    assert "kernel.c:4:" in result.output
    assert "'slef' undeclared" in result.output


def test_one_broken_kernel_does_not_keep_others_from_being_checked() -> None:
    script = registered("aten::cos", pointwise("broken", "cosf(slef[i])")) + registered("aten::relu", RELU)
    result = check_script(script)
    assert result.code == 1
    assert "2 kernels checked, not right: broken" in result.output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_kernel_that_ends_the_process_is_told() -> None:
    Path("crash.c").write_text("void crash(const float *self, float *out) { *(volatile float *)8 = self[0]; }")
    command = [
        sys.executable,
        "-m",
        "kagent_core.cli",
        "check-kernel",
        "crash.c",
        "--signature",
        "aten::neg",
        "--no-time",
    ]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the process that ran the kernel was ended by SIGSEGV during kernel 'crash' for aten::neg, sample 0" in (
        " ".join(done.stderr.split())
    )


# -- timing


def test_a_right_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel, "SIZES", (2**8, 2**10))
    monkeypatch.setattr(one_kernel, "ROUNDS", 2)
    Path("kernel.c").write_text(RELU)
    result = check("kernel.c", "--signature", "aten::relu", "--device", "cpu")
    assert result.code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("f32[")]
    assert len(rows) == 2
    assert all(row.count(" / ") == 3 for row in rows)
    found = only(check("kernel.c", "--signature", "aten::relu", "--device", "cpu", "--json"))
    assert [set(size["per_call"]) for size in found["times"]] == [{"yours", "the device's own", "eager"}] * 2
    assert all(size["own_kernels"] for size in found["times"])


def test_a_wrong_kernel_is_not_timed() -> None:
    Path("kernel.c").write_text(pointwise("wrong", "self[i] + 1"))
    found = only(check("kernel.c", "--signature", "aten::relu", "--device", "cpu", "--json"))
    assert found["times"] == []


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel, "SIZES", (2**8, 2**10))
    monkeypatch.setattr(one_kernel, "_SLOWEST_US", 0.0)
    monkeypatch.setattr(one_kernel, "ROUNDS", 1)
    Path("kernel.c").write_text(RELU)
    found = only(check("kernel.c", "--signature", "aten::relu", "--device", "cpu", "--json"))
    assert len(found["times"]) == 1
    assert found["remarks"] == ["a call of about 1,024 elements would take too long"]


# -- which kernels


def test_kernels_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("relu.c").write_text(RELU)
    Path("kagent.toml").write_text('[kernels]\n"aten::relu" = { device = "cpu", file = "relu.c" }\n')
    monkeypatch.delenv("KAGENT_CONFIG")
    result = check("--config", "--no-time")
    assert result.code == 0
    assert result.output.splitlines()[0].startswith("my_relu for aten::relu on cpu, ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "got neither a FILE nor --config"),
        (["kernel.c", "--config"], "got a FILE and --config"),
        (["--config"], "the config has no kernels"),
        (["--config", "--signature", "aten::relu"], "--signature is for the source of one kernel"),
        (["nothing.c", "--signature", "aten::relu"], "there is no file 'nothing.c'"),
        (["kernel.c"], "nothing says which operator 'kernel.c' computes"),
        (["kernel.c", "--signature", "aten::relu", "--derived", "n"], "--derived is 'n', expected NAME=EXPRESSION"),
        (["kernel.c", "--signature", "aten::reluu", "--device", "cpu"], "has no operator 'aten::reluu'"),
        (["empty.py"], "'empty.py' registers no kernel"),
        (
            ["empty.py", "--device", "cpu"],
            "--device is for the source of one kernel, and 'empty.py' is a Python script",
        ),
    ],
)
def test_what_the_command_refuses(arguments: list[str], told: str) -> None:
    Path("kernel.c").write_text(RELU)
    Path("empty.py").write_text("")
    result = check(*arguments)
    assert result.code == 1
    assert told in " ".join(result.output.split())


def test_a_fused_kernel_has_no_samples() -> None:
    script = "@kagent_core.kernel(('aten::relu', 'aten::neg'), device='cpu')\ndef both(self, out):\n    pass\n"
    assert "is no kernel for one operator" in check_script(script).output


def test_an_operator_without_samples() -> None:
    script = "@kagent_core.kernel('aten::linear', device='cpu')\ndef mine(x, w, b=None):\n    return x\n"
    result = check_script(script)
    assert result.code == 1
    assert "PyTorch takes aten::linear apart" in " ".join(result.output.split())


def test_without_expecttest_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch.testing._internal.common_methods_invocations":
            raise ModuleNotFoundError("No module named 'expecttest'", name="expecttest")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = check_source(RELU, "aten::relu")
    assert result.code == 1
    assert "needs the package 'expecttest'" in " ".join(result.output.split())
    assert "hint: pip install expecttest" in result.output


def test_errors_are_printed_as_messages(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(KagentError("it is wrong", hint="mend it"))
    assert capsys.readouterr().err == "error: it is wrong\n  hint: mend it\n"


def test_torchs_state_is_as_it_was() -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())
    state = torch.get_rng_state()
    check_source(RELU, "aten::relu", "--samples", "1")
    after = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())
    assert before == after
    assert state.numel() == torch.get_rng_state().numel()


def test_a_device_with_memory_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    from kagent_core import use_plugin
    from kagent_core.config import load_config
    from kagent_core.kernels import kernel
    from kagent_core.testing.fake import FakeDevice
    from kagent_core.testing.kernel_check import check_kernel, without_kernels

    def right(self: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        torch.neg(self, out=out)

    def wrong(self: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        torch.neg(self, out=out)
        out.view(-1)[numel // 2 : numel // 2 + 1] += 1

    prototype = "void neg(const float *self, float *out, int64_t numel)"
    for function in (right, wrong):
        made = kernel("aten::neg", function, device="fake", prototype=prototype, dtypes={"float32"})
        made.unregister()
        with use_plugin(FakeDevice()):
            caplog.clear()
            found = check_kernel(made, load_config(), samples=2)
            assert not [record for record in caplog.records if record.levelname == "WARNING"]
            if found.base is not None and found.right:
                times = one_kernel.time_kernel(made, without_kernels(load_config(), made), found.base)
                assert times.sizes
        assert found.right == (function is right)
        assert found.taken >= 4
    assert found.wrong[0].error.element is not None
    assert found.wrong[0].task.config is not None
    assert found.wrong[0].task.config.threads_per_block > 1
