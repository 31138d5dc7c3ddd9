"""Kernels as C text with a prototype, on the CPU: in compiled models, for one operator, in blocks, from the config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kagent_core
from kagent_core.config import Config, load_config
from kagent_core.errors import CompilationError, ConfigError, PackingError, RegistryError, SignatureError
from kagent_core.kernels import active_kernels, configured_kernels, kernel, override, registered_kernels
from kagent_core.layout import ANY_STRIDES, CONTIGUOUS, Layout
from kagent_core.session import session_for

TENFOLD = """
void tenfold(const float *self, float *out, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) out[i] = 10 * self[i];
}
"""
STRIDED_MM = """
void product(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k,
             int64_t a0, int64_t a1, int64_t b0, int64_t b1) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++) sum += a[i * a0 + l * a1] * b[l * b0 + j * b1];
            c[i * n + j] = sum;
        }
}
"""
MM_PROTOTYPE = """void product(const float *self, const float *mat2, float *out,
    int64_t self_size0, int64_t mat2_size1, int64_t self_size1,
    int64_t self_stride0, int64_t self_stride1, int64_t mat2_stride0, int64_t mat2_stride1)"""
MAX_DIM = """
void max_dim(const float *self, float *values, int64_t *indices, int64_t outer, int64_t n, int64_t inner) {
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) {
            const float *line = self + o * n * inner + i;
            int64_t best = 0;
            for (int64_t j = 1; j < n; j++) {
                float x = line[j * inner], top = line[best * inner];
                if (top == top && (x > top || x != x)) best = j;
            }
            values[o * inner + i] = line[best * inner];
            indices[o * inner + i] = best;
        }
}
"""
MAX_SIZES = {"outer": "prod(self.shape[:dim % self.ndim])", "n": "self.shape[dim]"}
MAX_SIZES |= {"inner": "prod(self.shape[dim % self.ndim + 1:])"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    assert not active_kernels(), "a test left a kernel registered"


@pytest.fixture
def tenfold():
    registered = kernel("aten::relu", device="cpu", source=TENFOLD)
    yield registered
    registered.unregister()


def relu(x, **options):
    return kagent_core.run_op("aten::relu", x, device="cpu")


def names_of_tasks(compiled, *args, **options):
    """Call a compiled function, and return its result and the kernels' names of its tasks, in order."""
    seen: list[str] = []

    class Watch:
        @kagent_core.hookimpl
        def kagent_task_finished(self, event):
            seen.append(event.task.kernel.name)

    with kagent_core.use_plugin(Watch()):
        result = torch.compile(compiled, backend="kagent", options={"device": "cpu", **options})(*args)
    return result, seen


# -- what a registration is


def test_a_source_alone_says_everything(tenfold) -> None:
    made = tenfold.descriptor
    assert made.name == "tenfold"
    assert [(p.name, p.type) for p in made.parameters] == [
        ("self", "const float*"),
        ("out", "float*"),
        ("numel", "int64_t"),
    ]
    assert (made.layout, made.dtypes) == (CONTIGUOUS, frozenset({"float32"}))
    assert not made.allocates


def test_a_prototype_may_call_the_parameters_otherwise() -> None:
    source = TENFOLD.replace("self", "x").replace("numel", "count").replace("out", "y")
    prototype = "void tenfold(const float *self, float *out, int64_t n)"
    with override("aten::relu", device="cpu", source=source, prototype=prototype, derived={"n": "numel"}):
        assert relu(torch.tensor([-1.0, 2.0])).tolist() == [-10.0, 20.0]


def test_a_name_chooses_one_of_several_functions() -> None:
    source = TENFOLD + TENFOLD.replace("tenfold", "elevenfold").replace("10 *", "11 *")
    with pytest.raises(PackingError, match="the source has 2 kernels, expected one"):
        kernel("aten::relu", device="cpu", source=source)
    with override("aten::relu", device="cpu", source=source, name="elevenfold"):
        assert relu(torch.ones(2)).tolist() == [11.0, 11.0]
    with pytest.raises(PackingError, match="no function 'void elevenfol") as caught:
        kernel("aten::relu", device="cpu", source=source, name="elevenfol")
    assert caught.value.hint == "did you mean 'elevenfold'?"


def test_a_source_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tenfold.c"
    path.write_text(TENFOLD)
    with override("aten::relu", device="cpu", source=path):
        assert relu(torch.ones(2)).tolist() == [10.0, 10.0]
    with pytest.raises(RegistryError, match=r"cannot read the kernel's source 'nothing\.c': No such file"):
        kernel("aten::relu", device="cpu", source=Path("nothing.c"))


def test_what_the_keywords_say_counts_before_what_follows_from_the_text() -> None:
    with override("aten::relu", device="cpu", source=TENFOLD, layout=ANY_STRIDES, dtypes={"float32", "int32"}) as made:
        assert made.descriptor.layout == ANY_STRIDES
        assert made.descriptor.dtypes == {"float32", "int32"}
    untyped = "void copy(const void *self, void *out, int64_t numel, int64_t size) { }"
    with override("aten::relu", device="cpu", source=untyped, derived={"size": "self.itemsize"}) as made:
        assert made.descriptor.dtypes is None


def test_a_source_decorates_no_function() -> None:
    registered = kernel("aten::relu", device="cpu", source=TENFOLD)
    try:
        with pytest.raises(TypeError, match="is registered by the call alone"):

            @registered
            def function(x):
                return x
    finally:
        registered.unregister()


@pytest.mark.parametrize(
    ("keywords", "told", "hint"),
    [
        ({"prototyp": "void r()"}, "'prototyp', which the kernel for aten::relu is given", "did you mean 'prototype'?"),
        ({"prototype": "void r()", "parameters": ()}, "a prototype and parameters", "leave one of them out"),
        ({"derived": {"n": "numel"}}, "given 'derived' without a prototype", 'add prototype="void name(...)"'),
    ],
)
def test_keywords_that_make_no_sense(keywords, told, hint) -> None:
    with pytest.raises(RegistryError) as caught:
        kernel("aten::relu", lambda x: x, device="cpu", **keywords)
    assert told in caught.value.message
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("prototype", "error", "told", "hint"),
    [
        (
            "void tenfold(const float *slf, float *out, int64_t numel)",
            RegistryError,
            "its parameter 'slf' is neither an argument nor a result of aten::relu, which has out, self",
            "did you mean 'self'?",
        ),
        ("void tenfold(const flaot *self, float *out, int64_t numel)", PackingError, "'flaot' is no type", "'float'"),
        ("void tenfold(float *out, int64_t numel)", RegistryError, "no parameter for 'self' of aten::relu", None),
        ("int tenfold(const float *self)", PackingError, "the source has 0 kernels", "void name(...)"),
    ],
)
def test_a_wrong_prototype_is_told_when_the_kernel_is_registered(prototype, error, told, hint) -> None:
    with pytest.raises(error) as caught:
        kernel("aten::relu", device="cpu", source=TENFOLD, prototype=prototype)
    assert told in caught.value.message
    assert caught.value.message.startswith("kernel 'tenfold' for aten::relu: ") or "user_kernel" in caught.value.message
    if hint is not None:
        assert hint in caught.value.hint


# -- what is computed


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4)])
def test_one_operator_of_any_shape(tenfold, shape) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(relu(x), 10 * x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_other_dtypes_are_left_to_the_device(tenfold, dtype) -> None:
    x = torch.tensor([-2, 3], dtype=dtype)
    assert relu(x).equal(torch.relu(x))


def test_views_and_strides(tenfold) -> None:
    x = torch.randn(6, 8)
    torch.testing.assert_close(relu(x[2:4]), 10 * x[2:4])  # contiguous behind an offset
    assert relu(x.t()).equal(torch.relu(x.t()))  # strided: left to the device's own kernel
    assert relu(x[:, ::2]).equal(torch.relu(x[:, ::2]))


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_kernel_that_is_given_strides(transposed) -> None:
    a = torch.randn(5, 4).t() if transposed[0] else torch.randn(4, 5)
    b = torch.randn(14, 5)[::2].t() if transposed[1] else torch.randn(5, 7)
    with override("aten::mm", device="cpu", source=STRIDED_MM, prototype=MM_PROTOTYPE, layout=ANY_STRIDES):
        got, names = names_of_tasks(lambda x, y: x @ y, a, b)
    assert names == ["product"]
    torch.testing.assert_close(got, a @ b)


def test_several_results_and_numbers_derived_from_an_argument() -> None:
    x = torch.randn(3, 4, 5)
    x[1, 2, 3] = float("nan")
    with override("aten::max.dim", device="cpu", source=MAX_DIM, derived=MAX_SIZES, ignore=["keepdim"]):
        for dim in (0, 1, -1):
            for keepdim in (False, True):
                got = kagent_core.run_op("aten::max.dim", x, dim, keepdim, device="cpu")
                want = torch.max(x, dim, keepdim)
                torch.testing.assert_close(got[0], want.values, equal_nan=True)
                assert got[1].equal(want.indices)
        got, names = names_of_tasks(lambda x: (x + 1).max(1), x)
    assert "max_dim" in names
    torch.testing.assert_close(got[0], (x + 1).max(1).values, equal_nan=True)


def test_an_operator_in_place() -> None:
    source = "void halve(float *self, int64_t self_numel) { for (int64_t i = 0; i < self_numel; i++) self[i] /= 2; }"
    x = torch.arange(12.0).view(3, 4)
    with override("aten::relu_", device="cpu", source=source):
        kagent_core.run_op("aten::relu_", x[1], device="cpu")
        assert x.tolist() == [[0, 1, 2, 3], [2, 2.5, 3, 3.5], [8, 9, 10, 11]]
        same = kagent_core.run_op("aten::relu_", x, device="cpu")
    assert same.data_ptr() == x.data_ptr()
    assert x[2].tolist() == [4, 4.5, 5, 5.5]


def test_a_result_is_new_memory_each_time(tenfold) -> None:
    first = relu(torch.ones(4))
    second = relu(torch.zeros(4))
    assert (first.tolist(), second.tolist()) == ([10.0] * 4, [0.0] * 4)


def test_types_that_are_passed_by_value() -> None:
    source = """
    typedef struct { int64_t data[3]; } shape3;
    void pack(const float *self, double *out, shape3 sizes, bool flag, uint8_t small, float single, double twice) {
        double values[] = {sizes.data[0], sizes.data[1], sizes.data[2], flag, small, single, twice};
        for (int i = 0; i < 7; i++) out[i] = values[i];
    }
    """
    derived = {"sizes": "(7, 8)", "flag": "True", "small": "255", "single": "0.1", "twice": "0.1"}
    with override("aten::exp", device="cpu", source=source, derived=derived, dtypes={"float32", "float64"}) as made:
        from kagent_core.extract.pack_prototype import PrototypePacker
        from kagent_core.specs import DType, OpCall, TensorSpec
        from kagent_cpu.source import SourceLoader, values_of

        x = TensorSpec(DType("float32", 4), (7,), (1,), 0, 0)
        y = TensorSpec(DType("float64", 8), (7,), (1,), 0, 1)
        call = OpCall(0, "exp", "aten::exp", {"self": x}, (x,), (y,), (y,), overload=torch.ops.aten.exp.default)
        args = PrototypePacker().pack(call, made.descriptor)
        loaded = SourceLoader(load_config().cache_dir)(made.descriptor)

        out = torch.empty(7, dtype=torch.float64)
        given = torch.empty(7)
        values = values_of(SimpleNamespace(args=args), loaded)
        loaded.function(given.data_ptr(), out.data_ptr(), *values[2:])
    assert out.tolist() == [7, 8, 0, 1, 255, torch.tensor(0.1).item(), 0.1]


@pytest.mark.parametrize("ctype", ["_Float16", "float2"])
def test_types_that_cannot_be_passed_by_value(ctype) -> None:
    source = f"void r(const float *self, float *out, {ctype} x) {{}}"
    with (
        override("aten::relu", device="cpu", source=source, derived={"x": "1"}),
        pytest.raises(PackingError, match=rf"parameter 'x' of kernel 'r' for aten::relu .* is a {ctype}"),
    ):
        relu(torch.ones(2))


# -- in models


def test_in_a_compiled_model_next_to_generated_kernels(tenfold) -> None:
    def function(x, y):
        return torch.relu(x.sin() + y).cos() * 2

    x, y = torch.randn(4, 5), torch.randn(5)
    got, names = names_of_tasks(function, x, y)
    torch.testing.assert_close(got, (10 * (x.sin() + y)).cos() * 2)
    assert len(names) == 3, "what is before and behind it fuses, it does not"
    assert names[1] == "tenfold"


def test_a_model_with_training_and_dynamic_shapes(tenfold) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    compiled = torch.compile(model, backend="kagent", options={"device": "cpu"})
    for rows in (4, 5, 6, 4):
        x = torch.randn(rows, 6)
        got = compiled(x)
        torch.testing.assert_close(got, model[2](10 * model[0](x)))
        got.sum().backward()
    assert model[0].weight.grad is not None


def test_replays_use_the_memory_of_the_call(tenfold) -> None:
    compiled = torch.compile(lambda x: torch.relu(x[1:]) + 1, backend="kagent", options={"device": "cpu"})
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), 10 * x[1:] + 1)


def test_a_block_ends(tenfold) -> None:
    compiled = torch.compile(torch.relu, backend="kagent", options={"device": "cpu"})
    x = torch.tensor([-1.0, 2.0])
    eleven = TENFOLD.replace("10 *", "11 *")
    with override("aten::relu", device="cpu", source=eleven):
        assert compiled(x).tolist() == [-11.0, 22.0]
    assert compiled(x).tolist() == [-10.0, 20.0]


def test_an_argument_without_a_parameter_is_right_for_its_default_only() -> None:
    gelu = TENFOLD.replace("tenfold", "gelu")
    x = torch.randn(5)
    with override("aten::gelu", device="cpu", source=gelu):
        torch.testing.assert_close(kagent_core.run_op("aten::gelu", x, device="cpu"), 10 * x)
        tanh = kagent_core.run_op("aten::gelu", x, approximate="tanh", device="cpu")
    torch.testing.assert_close(tanh, torch.nn.functional.gelu(x, approximate="tanh"))


def test_a_tensor_that_may_be_left_out_is_left_to_the_device_when_it_comes() -> None:
    source = "void norm(const float *input, float *out0, float *out1, float *out2) {}"
    with override(
        "aten::native_layer_norm", device="cpu", source=source, ignore=["normalized_shape", "eps"], dtypes={"float32"}
    ):
        x, weight = torch.randn(2, 3), torch.randn(3)
        got = kagent_core.run_op("aten::native_layer_norm", x, [3], weight, None, 1e-5, device="cpu")
    torch.testing.assert_close(got[0], torch.nn.functional.layer_norm(x, [3], weight))


def test_each_pointer_has_a_dtype_of_its_own() -> None:
    with override("aten::max.dim", device="cpu", source=MAX_DIM, derived=MAX_SIZES, ignore=["keepdim"]) as made:
        assert made.descriptor.dtypes == {"float32", "int64"}
        got = kagent_core.run_op("aten::max.dim", torch.tensor([[3, 9]]), 1, device="cpu")
    assert got[0].tolist() == [9]


def test_many_threads_call_it_at_once(tenfold) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def call(n):
        return relu(torch.full((n % 3 + 1,), float(n))).tolist() == [10.0 * n] * (n % 3 + 1)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))


# -- when it cannot be compiled


def test_a_compile_error_has_the_lines_of_the_text_and_the_place_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "broken.c"
    path.write_text(TENFOLD.replace("self[i]", "slef[i]"))
    for source, file in ((path.read_text(), "tenfold"), (path, "broken.c")):
        with override("aten::relu", device="cpu", source=source), pytest.raises(CompilationError) as caught:
            relu(torch.ones(2))
        told = caught.value.message
        assert f"kernel 'tenfold' for aten::relu ({__file__}:" in told
        assert f"{file}:3:" in told
        assert "'slef' undeclared" in told
        assert caught.value.hint.startswith("the C source is '")


@pytest.mark.parametrize(
    "prototype",
    [
        "void tenfold(const float *self, float *out, int numel)",  # wrong type
        "void tenfold(const float *self, int64_t numel, float *out)",  # wrong order
        "void tenfold(const double *self, double *out, int64_t numel)",  # wrong pointers
        "void tenfold(const float *self, float *out)",  # one too few
    ],
)
def test_a_prototype_that_is_not_the_functions_own_is_a_compile_error(prototype: str) -> None:
    x = torch.ones(2, dtype=torch.float64 if "double" in prototype else torch.float32)
    with (
        override("aten::relu", device="cpu", source=TENFOLD, prototype=prototype),
        pytest.raises(CompilationError, match="does not compile:\n  prototype of tenfold:1:6: error: conflicting"),
    ):
        relu(x)


def test_a_function_that_is_not_there() -> None:
    prototype = "void tenflod(const float *self, float *out, int64_t numel)"
    with (
        override("aten::relu", device="cpu", source=TENFOLD, prototype=prototype),
        pytest.raises(CompilationError, match=r"has no function 'void tenflod\(\.\.\.\)' to call") as caught,
    ):
        relu(torch.ones(2))
    assert caught.value.hint == "did you mean 'tenfold'?"
    with (
        override("aten::relu", device="cpu", source=TENFOLD.replace("void", "static void"), prototype=TENFOLD),
        pytest.raises(CompilationError) as caught,
    ):
        relu(torch.ones(2))
    assert caught.value.hint == "do not declare it static or inline"


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from kagent_cpu import source as module

    monkeypatch.setattr(module, "find_compiler", lambda: None)
    monkeypatch.setattr(module, "why_no_compiler", lambda: "no C compiler works here")
    text = TENFOLD + "/* nobody has compiled this */"
    with override("aten::relu", device="cpu", source=text), pytest.raises(CompilationError) as caught:
        relu(torch.ones(2))
    assert caught.value.message.endswith("is C text, and no C compiler works here")
    assert "kagent-cpu[compiler]" in caught.value.hint


def test_a_source_without_parameters_cannot_be_called() -> None:
    with (
        override("aten::relu", device="cpu", source=TENFOLD, parameters=(), name="tenfold"),
        pytest.raises(PackingError, match="is C text without a prototype"),
    ):
        relu(torch.ones(2))


# -- from the config


def write_config(name: str = "kagent.toml", **entry) -> Path:
    Path("kernels").mkdir(exist_ok=True)
    Path("kernels/tenfold.c").write_text(TENFOLD)
    entry = {"device": "cpu", "file": "kernels/tenfold.c", **entry}
    spelled = ", ".join(f"{key} = {value!r}" for key, value in entry.items())
    table = "kernels" if name == "kagent.toml" else "tool.kagent.kernels"
    Path(name).write_text(f'[{table}]\n"aten::relu" = {{ {spelled} }}\n')
    return Path(name).absolute()


@pytest.mark.parametrize("name", ["kagent.toml", "pyproject.toml"])
def test_both_files_have_kernels(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_config(name, prototype="void tenfold(const float *self, float *out, int64_t numel)")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")  # the path starts at the file, not here
    assert relu(torch.tensor([-1.0, 2.0])).tolist() == [-10.0, 20.0]
    compiled = torch.compile(torch.relu, backend="kagent", options={"device": "cpu"})
    assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [-10.0, 20.0]


def test_a_programs_own_kernel_outranks_the_configs() -> None:
    write_config(priority=1000)
    x = torch.tensor([-1.0, 2.0])
    assert relu(x).tolist() == [-10.0, 20.0]
    registered = kernel("aten::relu", lambda x: x + 1, device="cpu")
    try:
        assert relu(x).tolist() == [0.0, 3.0]
    finally:
        registered.unregister()
    with override("aten::relu", torch.neg, device="cpu"):
        assert relu(x).tolist() == [1.0, -2.0]
    assert relu(x).tolist() == [-10.0, 20.0]
    assert kagent_core.run_op("aten::relu", x.double(), device="cpu").tolist() == [0.0, 2.0]


def test_a_kernel_of_the_config_says_where_it_is_from() -> None:
    path = write_config()
    [made] = configured_kernels(load_config())
    assert made.descriptor.origin == f"{path}: key 'kernels' of 'aten::relu'"
    assert made.descriptor.name == "tenfold"
    assert made not in registered_kernels()


def test_variants_of_one_signature() -> None:
    Path("a.c").write_text(TENFOLD)
    Path("b.c").write_text(TENFOLD.replace("float", "double").replace("tenfold", "twentyfold").replace("10 *", "20 *"))
    options = {"kernels": {"aten::relu": [{"device": "cpu", "file": f"{name}.c"} for name in "ab"]}}
    session = session_for(load_config({"device": "cpu", **options}))
    compiled = torch.compile(torch.relu, backend="kagent", options={"device": "cpu", **options})
    assert compiled(torch.ones(2)).tolist() == [10.0, 10.0]
    assert compiled(torch.ones(2, dtype=torch.float64)).tolist() == [20.0, 20.0]
    assert session is session_for(load_config({"device": "cpu", **options}))


def test_a_changed_file_is_another_config() -> None:
    write_config()
    before = load_config()
    Path("kernels/tenfold.c").write_text(TENFOLD.replace("10 *", "30 *"))
    assert load_config() != before
    assert relu(torch.ones(1)).tolist() == [30.0]


def test_every_keyword_of_an_entry_counts() -> None:
    Path("mm.c").write_text(STRIDED_MM)
    entry = {
        "device": "cpu",
        "file": "mm.c",
        "prototype": MM_PROTOTYPE.replace("self_size0", "m"),
        "derived": {"m": "self.shape[0]"},
        "layout": "contiguous",
        "layouts": {"mat2": "any"},
        "dtypes": ["float32"],
        "priority": 3,
    }
    config = load_config({"device": "cpu", "kernels": {"aten::mm": entry}})
    [made] = configured_kernels(config)
    assert made.descriptor.layout == CONTIGUOUS
    assert made.descriptor.layout_of("mat2") == ANY_STRIDES
    assert isinstance(made.descriptor.layout_of("self"), Layout)
    assert (made.descriptor.dtypes, made.descriptor.priority) == (frozenset({"float32"}), 3)
    assert Config(**config.as_dict()) == config
    compiled = torch.compile(torch.mm, backend="kagent", options={"device": "cpu", "kernels": {"aten::mm": entry}})
    a, b = torch.randn(3, 4), torch.randn(5, 4).t()
    torch.testing.assert_close(compiled(a, b), a @ b)


@pytest.mark.parametrize(
    ("entry", "told", "hint"),
    [
        (
            {"file": "nothing.c"},
            "has the file '{here}/nothing.c' for 'aten::relu' (No such file",
            "starts at the config",
        ),
        ({"fil": "tenfold.c"}, "has 'fil' for 'aten::relu', expected the keys derived, device, dtypes", "'file'"),
        ({"device": "CPU"}, "has device = 'CPU' for 'aten::relu', expected a device TYPE", "did you mean 'cpu'?"),
        ({"layout": "contiguos"}, "has layout = 'contiguos' for 'aten::relu', expected 'any'", "'contiguous'"),
        ({"priority": "high"}, "has priority = 'high' for 'aten::relu', expected a whole number", None),
        ({"dtypes": "float32"}, "has dtypes = 'float32' for 'aten::relu', expected a list of names", None),
    ],
)
def test_a_wrong_entry_names_the_file_and_the_key(entry, told, hint, tmp_path: Path) -> None:
    path = write_config(**entry)
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert caught.value.message.startswith(f"{path}: key 'kernels' ")
    assert told.format(here=tmp_path) in caught.value.message
    if hint is not None:
        assert hint in caught.value.hint


def test_a_kernel_of_the_config_that_does_not_fit_its_operator() -> None:
    path = write_config(prototype="void tenfold(const float *slf, float *out, int64_t numel)")
    with pytest.raises(ConfigError) as caught:
        relu(torch.ones(2))
    assert caught.value.message.startswith(f"{path}: key 'kernels' of 'aten::relu': kernel 'tenfold' for aten::relu: ")
    assert caught.value.hint == "did you mean 'self'?"
    Path("kagent.toml").write_text(Path("kagent.toml").read_text().replace("aten::relu", "aten::reluu"))
    with pytest.raises(ConfigError, match="has no operator 'aten::reluu'") as caught:
        relu(torch.ones(2))
    assert isinstance(caught.value.__cause__, SignatureError)


def test_kernels_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tenfold.c").write_text(TENFOLD)
    monkeypatch.setenv("KAGENT_KERNELS", '{"aten::relu": {"device": "cpu", "file": "tenfold.c"}}')
    assert relu(torch.ones(1)).tolist() == [10.0]
    monkeypatch.setenv("KAGENT_KERNELS", "aten::relu=tenfold.c")
    with pytest.raises(ConfigError, match=r"environment variable KAGENT_KERNELS is .* expected a JSON object"):
        load_config()


def test_the_configs_row_is_what_the_environment_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kagent_core.config import config_rows

    write_config()
    config = load_config()
    [row] = [row for row in config_rows(config, {}) if row.key == "kernels"]
    Path("kagent.toml").unlink()
    monkeypatch.setenv("KAGENT_KERNELS", row.value)
    assert load_config() == config
