"""Attention as the CPU's generated kernel, against eager PyTorch and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kagent_core import hookimpl, use_plugin
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.generic.host_attention import FEW
from kagent_core.codegen.host_vectors import HostVectors
from kagent_core.codegen.loops import write_loops
from kagent_core.codegen.rules import RULES
from kagent_core.config import load_config
from kagent_core.native import find_compiler
from kagent_cpu.generate import ATTENTION, MANY_THREADS, TILES, WIDE_NBYTES, code_generator, generated_is_better
from kagent_cpu.language import CLanguage

from ..codegen_programs import generator, kernels, program, source_of, text_of
from .traced import CPU, compiled

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]
LENGTHS = (1, 2, 4, 5, 7, 17, 33, 64, 129)
SIZES = (1, 7, 16, 32, 33, 64, 80, 128)
INFINITY = math.inf


class OtherVectors(CLanguage):
    """C with vectors that may not be the processor's widest: compilers split or widen them."""

    def __init__(self, nbytes: int, registers: int) -> None:
        self.host_vectors = HostVectors(nbytes, registers)

    def preamble(self) -> str:
        text = super().preamble()
        own = CLanguage.host_vectors.preamble()
        assert own in text
        return text.replace(own, self.host_vectors.preamble())


class NoVectors(CLanguage):
    """C without: then work-items compute as on other devices."""

    host_vectors = None  # type: ignore[assignment]


def large(language: CLanguage | None = None) -> ExpressionGenerator:
    """The generator with the CPU's own sizes of pieces, rather than small ones."""
    return ExpressionGenerator(
        language or CLanguage(), write_loops, generic=GenericKernels(GENERIC, RULES, True, TILES)
    )


def heads(batch: int, count: int, length: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Heads as they lie after a projection to queries, keys and values at once."""
    made = torch.Generator().manual_seed(seed + length + size)
    packed = torch.randn(batch, length, 3, count, size, generator=made, dtype=torch.float64).to(dtype)
    return packed[:, :, seed % 3].transpose(1, 2)


def triple(batch: int, count: int, lengths: tuple[int, int], size: int, dtype: torch.dtype = torch.float32) -> Tensors:
    queries, keys = lengths
    rest = [heads(batch, count, keys, size, dtype, seed) for seed in (1, 2)]
    return heads(batch, count, queries, size, dtype), *rest


def attend(*args: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, *mask = args
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask[0] if mask else None, **options
    )


Case = tuple[Callable[..., Any], Tensors]


def case(*args: torch.Tensor, **options: Any) -> Case:
    return (lambda *given: attend(*given, **options)), args


def laid_out(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return its type, its shape, and its strides where they lay something out."""
    strides = tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    return tensor.dtype, tensor.shape, strides


def check(cases: Sequence[Case], making: ExpressionGenerator | None = None) -> None:
    """Compare with eager PyTorch: strides, dtypes, NaN, values, and how far all results are from float64's."""
    errors = [[0.0, 0.0], [0.0, 0.0]]
    for made, (function, args) in zip(kernels(cases, making), cases, strict=True):
        described = [(tuple(arg.shape), arg.stride(), arg.dtype) for arg in args]
        eagers = function(*args)
        exacts = function(*(arg.double() for arg in args))
        for number, (ours, eager, exact) in enumerate(zip(made(*args), eagers, exacts, strict=True)):
            assert laid_out(ours) == laid_out(eager), described
            assert torch.equal(ours.isnan(), eager.isnan()), described
            if eager.dtype.itemsize == 4 and args[0].dtype.itemsize == 4:
                torch.testing.assert_close(ours, eager, equal_nan=True, msg=lambda text, d=described: f"{text}\n{d}")
            for which, one in enumerate((ours, eager)):
                errors[number][which] += float((one.double() - exact).nan_to_num(0.0).square().sum())
    for own, eagers_error in errors:
        times = 3 if cases[0][1][0].dtype.itemsize < 4 else 2
        assert math.sqrt(own) <= times * math.sqrt(eagers_error)


# -- values, lengths, sizes, layouts


@pytest.mark.parametrize("making", [generator, large], ids=["small pieces", "large pieces"])
def test_lengths(making: Callable[[], ExpressionGenerator]) -> None:
    check([case(*triple(2, 3, (n, m), 16)) for n in LENGTHS for m in (1, n, 40, 300)], making())


def test_sizes_of_heads() -> None:
    check([case(*triple(1, 2, (n, 45), size)) for size in SIZES for n in (1, 3, 19, 37)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    cases = [case(*triple(2, 2, (n, 37), size, dtype)) for n in (1, 4, 19, 50) for size in (16, 33, 64)]
    if dtype != torch.float64:  # of which float64 leaves nothing to compare with
        check(cases)
        return
    for made, (function, args) in zip(kernels(cases), cases, strict=True):
        for ours, eager in zip(made(*args), function(*args), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-13, atol=1e-13)


def test_large_heads_lose_no_digits() -> None:
    check([case(*triple(1, 2, (40, 70), size)) for size in (129, 300, 512, 1024)], large())


def test_layouts() -> None:
    torch.manual_seed(0)
    contiguous = tuple(torch.randn(2, 3, 20, 16) for _ in range(3))
    sliced = tuple(torch.randn(2, 3, 41, 33)[:, :, 1::2, :16] for _ in range(3))
    turned = tuple(torch.randn(2, 3, 16, 20).transpose(2, 3) for _ in range(3))
    apart = tuple(torch.randn(2, 3, 20, 33)[..., 1::2] for _ in range(3))
    expanded = tuple(torch.randn(1, 1, 20, 16).expand(2, 3, 20, 16) for _ in range(3))
    cases = []
    for q, k, v in (contiguous, sliced, turned, apart, expanded):
        cases += [case(q, k, v), case(q[:, :, 3:6], k, v), case(q[:, :, 5:6], k[:, :, 2:], v[:, :, 2:])]
    eager_takes = [one for one in cases if all(arg.stride(3) == 1 for arg in one[1])]
    check(eager_takes)
    for made, (_, args) in zip(kernels(cases), cases, strict=True):
        expected = functional.scaled_dot_product_attention(*args)
        torch.testing.assert_close(made(*args)[0], expected)


def test_a_scale() -> None:
    args = triple(1, 2, (20, 30), 16)
    check([case(*args, scale=scale) for scale in (0.0, 0.3, -1.5, 30.0)])


@pytest.mark.parametrize("count", [1, 2, 6])
def test_heads_that_share_keys(count: int) -> None:
    """As many key heads as divide the query's: each serves neighbouring heads of queries."""
    cases = []
    for queries, keys in ((1, 50), (3, 50), (30, 50)):
        query, (_, key, value) = heads(2, 6, queries, 16), triple(2, count, (1, keys), 16)
        cases.append(case(query, key, value))
        cases.append(case(query, key, value, is_causal=True))
    check(cases)


def test_no_queries() -> None:
    [made] = kernels([case(*triple(2, 3, (0, 5), 16))])
    assert [tuple(one.shape) for one in made(*triple(2, 3, (0, 5), 16))] == [(2, 3, 0, 16), (2, 3, 0)]


def test_no_keys() -> None:
    """ATen's kernel divides by their number; by definition the sum of no values is 0."""
    for queries in (2, 20):
        args = triple(2, 3, (queries, 0), 16)
        [made] = kernels([case(*args)])
        out, logs = made(*args)
        assert not out.any()
        assert not logs.any()


# -- masks


def masks(queries: int, keys: int) -> list[torch.Tensor]:
    """Masks of every shape that ATen's kernel takes, some with rows that hide everything."""
    torch.manual_seed(0)
    hidden = torch.where(torch.rand(queries, keys) > 0.4, torch.randn(queries, keys), -INFINITY)
    hidden[queries // 2] = -INFINITY
    padded = torch.zeros(2, 1, 1, keys)
    padded[0, ..., keys // 2 :] = -INFINITY
    return [
        *(hidden, torch.randn(1, keys), torch.randn(queries, 1), torch.randn(1, 1), padded),
        *(torch.randn(2, 3, queries, keys), torch.randn(1, 3, queries, keys), torch.randn(2, 1, queries, keys)),
        *(hidden.t().contiguous().t(), torch.randn(2, 3, 1, keys), torch.randn(1, keys).expand(queries, keys)),
    ]


@pytest.mark.parametrize("queries", [1, 3, 20, 70])
def test_masks(queries: int) -> None:
    args = triple(2, 3, (queries, 75), 16)
    check([case(*args, mask) for mask in masks(queries, 75)])
    check([case(*args, mask, is_causal=True) for mask in masks(queries, 75)[:2]])


def test_masks_of_other_types() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        args = triple(2, 3, (20, 40), 16, dtype)
        check([case(*args, mask.to(dtype)) for mask in masks(20, 40)[:5]])
        check([case(*args, masks(20, 40)[0].float())])


def test_booleans() -> None:
    """What eager PyTorch makes a mask of numbers from, before it calls the operator."""
    for queries in (2, 20):
        args, seen = triple(2, 3, (queries, 40), 16), torch.rand(2, 1, queries, 40) > 0.5
        seen[0, 0, 1] = False
        [made] = kernels([case(*args, seen)])
        torch.testing.assert_close(made(*args, seen)[0], functional.scaled_dot_product_attention(*args, seen))


@pytest.mark.parametrize("making", [generator, large], ids=["small pieces", "large pieces"])
def test_causal(making: Callable[[], ExpressionGenerator]) -> None:
    lengths = [(n, m) for n in (1, 3, 20, 33, 129) for m in (1, 17, 64, 150)]
    check([case(*triple(2, 2, pair, 16), is_causal=True) for pair in lengths], making())


# -- NaN and infinity


def spoiled(args: Tensors, which: int, place: tuple[int, ...], value: float) -> Tensors:
    changed = [arg.clone() for arg in args]
    changed[which][place] = value
    return tuple(changed)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("value", [math.nan, INFINITY, -INFINITY, 3e38])
def test_what_is_no_number_goes_where_it_goes_in_eager(queries: int, value: float) -> None:
    args = triple(1, 2, (queries, 40), 16)
    mask = torch.randn(queries, 40)
    places = [(0, (0, 1, 1, 3)), (1, (0, 0, 37, 2)), (2, (0, 1, 5, 4))]
    cases = [case(*spoiled(args, which, place, value)) for which, place in places]
    cases += [case(*spoiled((*args, mask), 3, (1, 7), value))]
    for made, (function, given) in zip(kernels(cases), cases, strict=True):
        (out, logs), (eager, eagers_logs) = made(*given), function(*given)
        torch.testing.assert_close(out, eager, equal_nan=True)
        seen = eagers_logs != INFINITY  # where a score is infinite, the sum of what is relative to it is NaN
        torch.testing.assert_close(logs[seen], eagers_logs[seen], equal_nan=True)
        assert logs[~seen].isnan().all()


def test_a_mask_of_a_query_that_is_hidden_but_for_a_nan() -> None:
    for queries in (2, 20):
        args, mask = triple(1, 1, (queries, 20), 8), torch.full((queries, 20), -INFINITY)
        mask[1, 3] = math.nan
        [made] = kernels([case(*args, mask)])
        torch.testing.assert_close(made(*args, mask)[0], attend(*args, mask)[0], equal_nan=True)


# -- vectors of other processors


@pytest.mark.parametrize(("nbytes", "registers"), [(16, 16), (16, 32), (32, 16), (64, 32)])
def test_vectors_of_other_processors(nbytes: int, registers: int) -> None:
    making = large(OtherVectors(nbytes, registers))
    cases = [case(*triple(1, 2, (n, 45), size)) for n in (1, 3, 9, 37) for size in (7, 40)]
    cases += [case(*triple(1, 2, (37, 45), 16), is_causal=True), case(*triple(2, 3, (37, 45), 16), masks(37, 45)[0])]
    check(cases, making)


def test_without_vectors() -> None:
    check([case(*triple(1, 2, (n, 45), 16), is_causal=causal) for n in (1, 20) for causal in (False, True)])
    making = large(NoVectors())
    check([case(*triple(1, 2, (n, 45), 16), is_causal=causal) for n in (1, 20) for causal in (False, True)], making)


def test_heads_that_share_keys_are_refused_without_vectors() -> None:
    query, (_, key, value) = heads(1, 4, 5, 16), triple(1, 2, (1, 6), 16)
    reason = large(NoVectors()).can_generate(program(attend, query, key, value).calls)
    assert reason == "4 heads of queries and 2 of keys"


def test_gradients_of_heads_that_share_keys_are_refused() -> None:
    query, (_, key, value) = heads(1, 4, 5, 16), triple(1, 2, (1, 6), 16)
    out, logs = attend(query, key, value)

    def back(*args: torch.Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, False)

    reason = GenericKernels(GENERIC, RULES).refusal(program(back, out, query, key, value, out, logs).calls)
    assert reason is not None
    assert "4 heads of queries and 2 of keys" in reason


# -- the text


def test_other_lengths_have_the_same_text() -> None:
    texts = {text_of(attend, *triple(2, 3, pair, 32), making=large()) for pair in ((90, 100), (100, 170), (200, 300))}
    assert len(texts) == 1


def test_pieces_fit_into_a_cache() -> None:
    for size in (16, 128, 1024):
        source = source_of(program(attend, *triple(1, 1, (40, 40), size)), large())
        assert source.text  # memory of a work-item is checked where it is declared


# -- where it is taken


def calls_of(*args: torch.Tensor, **options: Any) -> Any:
    return program(lambda *given: attend(*given, **options), *args).calls[0]


def test_it_is_taken_where_vectors_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls_of(*triple(1, 2, (20, 20), 16))
    assert call.signature == ATTENTION
    for nbytes, taken in ((WIDE_NBYTES, True), (WIDE_NBYTES // 2, False)):
        monkeypatch.setattr(CLanguage, "host_vectors", HostVectors(nbytes))
        assert generated_is_better(call) is taken


def test_few_queries_are_left_to_aten_without_gcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "host_vectors", HostVectors(WIDE_NBYTES))
    few, more = (calls_of(*triple(1, 2, (n, 20), 16)) for n in (FEW, FEW + 1))
    compiler = find_compiler()
    assert compiler is not None
    for kind, taken in (("gcc", True), ("clang", False)):
        monkeypatch.setattr("kagent_cpu.generate.find_compiler", lambda k=kind: replace(compiler, kind=k))
        assert generated_is_better(few) is taken
        assert generated_is_better(more)


def test_many_threads_get_more_pieces() -> None:
    call = calls_of(*triple(1, 2, (300, 20), 16))
    texts = []
    for threads in (1, MANY_THREADS - 1, MANY_THREADS, 64):
        making = code_generator(load_config(options={**CPU, "threads": threads}))
        assert making is not None
        texts.append(making.source([call], {spec.buffer for spec in call.outputs}).text)
    assert texts[0] == texts[1] != texts[2] == texts[3]


class Kernels:
    """Notes which kernels run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @hookimpl
    def kagent_task_finished(self, event: Any) -> None:
        self.names += [event.task.kernel.name for call in event.task.calls if call.signature == ATTENTION]


def taken_by(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    noted = Kernels()
    with use_plugin(noted):
        made = compiled(function, **CPU, profile=True)(*args)
    return made, noted.names


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the generated kernel be taken, whatever this processor's vectors are."""
    monkeypatch.setattr("kagent_cpu.generate.WIDE_NBYTES", CLanguage.host_vectors.nbytes)


@pytest.mark.usefixtures("wide")
def test_a_model_takes_it() -> None:
    q, k, v = triple(2, 4, (20, 30), 16)
    seen = torch.rand(20, 30) > 0.3
    functions: list[tuple[Callable[..., Any], Tensors]] = [
        (functional.scaled_dot_product_attention, (q, k, v)),
        (functional.scaled_dot_product_attention, (q, k, v, seen)),
        (functional.scaled_dot_product_attention, (q.bfloat16(), k.bfloat16(), v.bfloat16())),
        (lambda *a: functional.scaled_dot_product_attention(*a, is_causal=True), (q, k, v)),
        (lambda *a: functional.scaled_dot_product_attention(*a, enable_gqa=True), (q, k[:, :2], v[:, :2])),
        (lambda *a: functional.scaled_dot_product_attention(*a).transpose(1, 2).flatten(2), (q, k, v)),
    ]
    for function, args in functions:
        made, names = taken_by(function, *args)
        assert names
        assert not any(name.startswith("aten::") for name in names)
        expected = function(*args)
        assert laid_out(made) == laid_out(expected)
        if made.dtype == torch.float32:
            torch.testing.assert_close(made, expected)
        else:
            exact = function(*(arg.double() for arg in args))
            assert (made.double() - exact).norm() <= 3 * (expected.double() - exact).norm()


@pytest.mark.usefixtures("wide")
def test_gradients_are_eagers() -> None:
    """ATen's backward computes the probabilities again, from what the forward kernel says that scores sum up to."""

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    given = [arg.detach().clone().requires_grad_() for arg in triple(2, 3, (37, 45), 16)]
    others = [arg.detach().clone().requires_grad_() for arg in given]
    torch._dynamo.reset()
    compiled(loss, **CPU)(*given).backward()
    loss(*others).backward()
    for one, other in zip(given, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.usefixtures("wide")
def test_several_threads() -> None:
    args = triple(2, 3, (600, 600), 32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made, names = taken_by(lambda *a: functional.scaled_dot_product_attention(*a, is_causal=True), *args)
    finally:
        torch.set_num_threads(before)
    assert names
    torch.testing.assert_close(made, functional.scaled_dot_product_attention(*args, is_causal=True))


def test_dropout_is_refused() -> None:
    reason = GenericKernels(GENERIC, RULES).refusal([calls_of(*triple(1, 2, (8, 8), 16), dropout_p=0.5)])
    assert reason is not None
    assert "draws random numbers" in reason


def test_logarithms_that_nobody_asks_for_are_not_computed() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(16))

        def forward(self, *args: torch.Tensor) -> Any:
            return functional.scaled_dot_product_attention(*args) * self.scale

    class Both(Attention):
        def forward(self, *args: torch.Tensor) -> Any:
            return attend(*args)[1], self.scale * 2

    args = triple(1, 2, (8, 9), 16)
    for model, given in ((Attention(), 1), (Both(), 2)):
        calls: list[Any] = []

        class Note:
            @hookimpl
            def kagent_task_finished(self, event: Any) -> None:
                calls.extend(event.task.calls)  # noqa: B023

        torch._dynamo.reset()
        with torch.no_grad(), use_plugin(Note()):
            torch.testing.assert_close(compiled(model, **CPU, profile=True)(*args), model(*args))
        [call] = [call for call in calls if call.signature == ATTENTION]
        assert sum(spec is not None for spec in call.results) == given
