"""A C compiler is found, or there is a reason why not; what it compiles joins torch's OpenMP runtime."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kagent_core.errors import CompilationError, ConfigError
from kagent_core.native import Compiler, find_compiler, load, why_no_compiler
from kagent_core.native import compiler as compiler_module
from kagent_core.native.flags import candidates, no_threads_reason
from kagent_core.native.openmp import mapped_runtimes, torch_runtime

GCC = shutil.which("gcc") or "gcc"

THREADS = """
extern int omp_get_num_threads(void);
void threads(const long long *table) {
  int *out = (int *)table[0];
  #pragma omp parallel for
  for (int i = 0; i < 64; i++) out[i] = omp_get_num_threads();
}
"""
COUNT = """
void count(const long long *table) {
  int *out = (int *)table[0];
  #pragma omp parallel for simd
  for (int i = 0; i < 64; i++) out[i] = i;
}
"""
EXP = """
__attribute__((simd("notinbranch"), const, nothrow)) float expf(float);
void exponential(const long long *table) {
  const float *x = (const float *)table[0];
  float *out = (float *)table[1];
  #pragma omp simd
  for (long long i = 0; i < table[2]; i++) out[i] = expf(x[i]);
}
"""


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a program; nothing else is on PATH, and no ziglang is installed."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler_module.importlib.util, "find_spec", lambda name: None)

    def write(name: str, script: str) -> Path:
        path = programs / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


def run_python(program: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- which compiler ------------------------------------------------------------------------------------------------


def test_gcc_comes_first(compiler: Compiler) -> None:
    assert compiler.command == (GCC,)
    assert compiler.kind == "gcc"
    assert compiler.single_thread is None
    assert "-fopenmp" in compiler.flags
    assert why_no_compiler() == ""


def test_cc_comes_before_gcc_and_may_hold_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", f"env 'KAGENT_NOTE=two words' {GCC}")
    found = find_compiler()
    assert found is not None
    assert found.command == (shutil.which("env"), "KAGENT_NOTE=two words", GCC)
    x, out = torch.zeros(4), torch.empty(4)
    table = torch.tensor([x.data_ptr(), out.data_ptr(), 4])
    load(EXP, tmp_path, found).function("exponential")(table.data_ptr())
    assert out.tolist() == [1.0] * 4


@pytest.mark.parametrize("cc", ["", "   "])
def test_an_empty_cc_counts_as_unset(monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    found = find_compiler()
    assert found is not None
    assert found.command == (GCC,)


@pytest.mark.parametrize("cc", ["no-such-compiler", "no-such-compiler -O1", "/nowhere/gcc", "gcc 'unclosed"])
def test_a_cc_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    with pytest.raises(ConfigError, match="environment variable CC is") as caught:
        find_compiler()
    assert cc in caught.value.message
    assert "unset it" in str(caught.value.hint)


def test_a_cc_that_does_not_work_is_a_reason_and_gcc_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert find_compiler() is None
    assert "CC is 'false'" in why_no_compiler()
    assert "--version failed" in why_no_compiler()


def test_without_a_compiler_the_reason_lists_what_was_looked_for(only) -> None:
    assert find_compiler() is None
    for word in ("gcc", "clang", "ziglang"):
        assert word in why_no_compiler()


def test_clang_is_taken_where_gcc_is_broken(only) -> None:
    only("gcc", 'case "$1" in --version) echo "gcc 1";; *) echo "fatal error: no such header" >&2; exit 1;; esac')
    only("clang", f'PATH={os.defpath}; exec {GCC} "$@"')
    found = find_compiler()
    assert found is not None
    assert Path(found.command[0]).name == "clang"


def test_a_compiler_whose_output_cannot_be_loaded_is_a_reason(only) -> None:
    only("gcc", 'test "$1" = --version && echo "gcc 1"; exit 0')
    assert find_compiler() is None
    assert "cannot load what it compiles" in why_no_compiler()


def test_a_compiler_that_fails_is_a_reason_with_its_first_error(only) -> None:
    only("gcc", 'case "$1" in --version) echo "gcc 1";; *) echo note >&2; echo "ld: error: no libc" >&2; exit 1;; esac')
    assert find_compiler() is None
    assert "gcc: cannot compile: ld: error: no libc" in why_no_compiler()


def test_without_libgomp_kernels_run_on_one_thread_and_the_reason_is_kept(only, tmp_path: Path) -> None:
    only(
        "gcc",
        f'for word; do test "$word" = -fopenmp && echo "error: no libgomp.spec" >&2 && exit 1; done\n'
        f'PATH={os.defpath}; exec {GCC} "$@"',
    )
    found = find_compiler()
    assert found is not None
    assert found.single_thread == "cannot compile: error: no libgomp.spec"
    assert "-fopenmp" not in found.flags
    out = torch.zeros(64, dtype=torch.int32)
    table = torch.tensor([out.data_ptr()])
    load(COUNT, tmp_path, found).function("count")(table.data_ptr())
    assert out.tolist() == list(range(64))


def test_the_search_is_remembered(only, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    only("gcc", f'echo "$1" >> {calls}; PATH={os.defpath}; exec {GCC} "$@"')
    first = find_compiler()
    counted = calls.read_text()
    assert find_compiler() is first
    assert calls.read_text() == counted


# ---- flags ---------------------------------------------------------------------------------------------------------


def test_where_native_is_spelled_otherwise_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    tried = [choice.flags for choice in candidates("clang", Path("/lib/libomp.so"))]
    assert "-march=native" in tried[0]
    assert "-mcpu=native" in tried[1]
    assert not any(flag.startswith("-fveclib") for flags in tried for flag in flags)


def test_clang_uses_threads_only_with_a_runtime_of_its_own_kind() -> None:
    assert [choice.threads for choice in candidates("clang", Path("/lib/libgomp.so.1"))] == [False, False]
    assert "libgomp.so.1" in str(no_threads_reason("clang", Path("/lib/libgomp.so.1")))
    best = next(candidates("clang", Path("/lib/libomp.so")))
    assert best.threads
    assert "/lib/libomp.so" in best.libraries
    assert no_threads_reason("clang", Path("/lib/libomp.so")) is None


@pytest.mark.parametrize("kind", ["gcc", "clang", "zig"])
def test_every_choice_keeps_eagers_arithmetic(kind: str) -> None:
    for choice in candidates(kind, None):
        assert {"-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"} <= set(choice.flags)
        assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-fassociative-math"} & set(choice.flags)


def test_products_and_sums_are_rounded_one_by_one(compiler: Compiler, tmp_path: Path) -> None:
    source = """
    void multiply_add(const long long *table) {
      const float *x = (const float *)table[0];
      float *out = (float *)table[1];
      for (long long i = 0; i < table[2]; i++) out[i] = x[i] * x[i] + -1.0f;
    }
    """
    x = 1 + torch.rand(1000) / 1000
    out = torch.empty_like(x)
    table = torch.tensor([x.data_ptr(), out.data_ptr(), x.numel()])
    load(source, tmp_path, compiler).function("multiply_add")(table.data_ptr())
    assert torch.equal(out, x * x - 1.0)


def test_vector_math_is_called_and_resolved(compiler: Compiler, tmp_path: Path) -> None:
    x = torch.linspace(-20, 20, 100_003)
    out = torch.empty_like(x)
    table = torch.tensor([x.data_ptr(), out.data_ptr(), x.numel()])
    library = load(EXP, tmp_path, compiler)
    library.function("exponential")(table.data_ptr())
    torch.testing.assert_close(out, x.exp())
    assert b"_ZGV" in library.path.read_bytes()


# ---- one OpenMP runtime --------------------------------------------------------------------------------------------


def test_torchs_runtime_is_found() -> None:
    runtime = torch_runtime()
    assert runtime is not None
    assert any(Path(path).samefile(runtime) for path in mapped_runtimes())


LOAD_THREADS = f"""
import ctypes, threading
from pathlib import Path
SOURCE = '''{THREADS}'''
def load_threads():
    from kagent_core.native import find_compiler, load
    return load(SOURCE, CACHE, find_compiler()).function("threads")
def team(call):
    out = (ctypes.c_int * 64)()
    table = (ctypes.c_longlong * 1)(ctypes.addressof(out))
    call(ctypes.addressof(table))
    return out[0]
"""


@pytest.mark.parametrize("first", ["torch", "native"])
def test_there_is_one_openmp_runtime_whatever_is_imported_first(tmp_path: Path, first: str) -> None:
    program = f"{LOAD_THREADS}CACHE = Path({str(tmp_path)!r})\n"
    program += "import torch\ncall = load_threads()\n" if first == "torch" else "call = load_threads()\nimport torch\n"
    program += "team(call); torch.rand(1 << 20).exp_()\n"
    program += "from kagent_core.native.openmp import mapped_runtimes\nprint(*mapped_runtimes(), sep='\\n')"
    runtimes = run_python(program)
    assert len(runtimes) == 1
    assert Path(runtimes[0]).samefile(str(torch_runtime()))


def test_torch_says_how_many_threads_a_parallel_loop_takes(tmp_path: Path) -> None:
    program = f"{LOAD_THREADS}CACHE = Path({str(tmp_path)!r})\n"
    program += """
import torch
call = load_threads()
for n in (1, 3, 2):
    torch.set_num_threads(n)
    print(team(call))
torch.set_num_threads(3)
def in_thread():
    torch.get_num_threads()
    print(team(call))
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""
    assert run_python(program) == ["1", "3", "2", "3"]


def test_finding_a_compiler_starts_no_thread() -> None:
    program = """
    import os, torch
    before = len(os.listdir("/proc/self/task"))
    from kagent_core.native import find_compiler
    assert find_compiler() is not None
    print(len(os.listdir("/proc/self/task")) - before)
    """
    assert run_python(program, OMP_NUM_THREADS="4") == ["0"]


def test_a_runtime_of_another_name_is_linked_instead_of_the_systems(tmp_path: Path) -> None:
    """Some builds of torch carry a libgomp whose name has a digest in it."""
    stub, runtime = tmp_path / "stub.c", tmp_path / "libgomp-1a2b3c.so.1"
    stub.write_text(
        "void GOMP_parallel(void (*f)(void *), void *data, unsigned n, unsigned flags) { f(data); }\n"
        "int omp_get_num_threads(void) { return 1; } int omp_get_thread_num(void) { return 0; }\n",
        encoding="utf-8",
    )
    soname = f"-Wl,-soname,{runtime.name}"
    subprocess.run([GCC, "-shared", "-fPIC", soname, str(stub), "-o", str(runtime)], check=True)
    choice = next(candidates("gcc", runtime))
    assert choice.threads
    source, output = tmp_path / "threads.c", tmp_path / "threads.so"
    source.write_text(THREADS, encoding="utf-8")
    command = Compiler((GCC,), "gcc", "", choice.flags, choice.libraries).command_line(source, output)
    subprocess.run(command, check=True)
    loaded = run_python(f"""
        import ctypes
        ctypes.CDLL({str(runtime)!r})
        ctypes.CDLL({str(output)!r})
        from kagent_core.native.openmp import mapped_runtimes
        print(*mapped_runtimes(), sep="\\n")
    """)
    assert loaded == [str(runtime)]


# ---- functions -----------------------------------------------------------------------------------------------------


def test_a_function_that_is_not_there_is_named(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(CompilationError, match="no function 'nothing'"):
        load("int one = 1;", tmp_path, compiler).function("nothing")


def test_an_address_above_4_gib_arrives_whole(compiler: Compiler, tmp_path: Path) -> None:
    source = "void keep(const long long *table) { ((long long *)table[0])[0] = (long long)table; }"
    out = ctypes.c_longlong()
    table = (ctypes.c_longlong * 1)(ctypes.addressof(out))
    load(source, tmp_path, compiler).function("keep")(ctypes.addressof(table))
    assert out.value == ctypes.addressof(table)
