"""Random numbers that devices make themselves, and those that eager PyTorch draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional

import kagent_core
from kagent_core.config import load_config
from kagent_core.inspect.report import PlanReport
from kagent_core.session import session_for
from kagent_core.testing.compare import check_against_eager

from ..philox import drawn_seed, philox, words

aten = torch.ops.aten
Function = Callable[..., Any]

ITSELF = {"device": "cpu", "random_numbers": "device"}
"""The CPU with generated C."""


def compiled(function: Function, device: str, **options: Any) -> Function:
    """Return a function that runs on a device, with numbers of the device's own."""
    torch._dynamo.reset()
    given = {"device": device, "random_numbers": "device" if device == "cpu" else "auto", **options}

    def fresh(*args: Any) -> Any:
        return function(*args)

    made: Function = torch.compile(fresh, backend="kagent", options=given, dynamic=False)
    return made


def seeded(function: Function, *args: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return function(*args)


def reports(device: str, **options: Any) -> list[PlanReport]:
    return list(session_for(load_config({"device": device, **options})).reports)


@pytest.fixture(params=["cpu", "toy:0"])
def device(request: pytest.FixtureRequest, toy: Any) -> str:
    """The CPU, with generated C, and a device with memory and a language of its own."""
    return str(request.param)


# -- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, the authors' own library
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_tests_own_philox_gives_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox(counter, key) == expected


def test_uniform_numbers_are_philox_of_seed_stream_and_place(device: str) -> None:
    def function() -> Any:
        return torch.rand(3, 7), torch.rand(9, dtype=torch.float64)

    single, double = seeded(compiled(function, device), seed=5)
    seed = drawn_seed(5)
    wanted = [(words(seed, 0, place)[0] & 0xFFFFFF) * 2.0**-24 for place in range(21)]
    assert single.flatten().tolist() == wanted
    both = [words(seed, 1, place)[:2] for place in range(9)]
    assert double.tolist() == [((low | high << 32) & (1 << 53) - 1) * 2.0**-53 for low, high in both]


def test_whole_numbers_are_the_upper_half_of_a_product(device: str) -> None:
    bounds = [(-(2**63), 2**63 - 1), (-5, 2), (0, 1), (10**12, 10**12 + 3 * 2**40)]

    def function() -> Any:
        return [torch.randint(low, high, (11,)) for low, high in bounds]

    made = seeded(compiled(function, device), seed=6)
    seed = drawn_seed(6)
    for stream, ((low, high), numbers) in enumerate(zip(bounds, made, strict=True)):
        wide = [words(seed, stream, place) for place in range(11)]
        assert numbers.tolist() == [low + ((w[0] | w[1] << 32) * (high - low) >> 64) for w in wide]


def test_devices_give_the_same_numbers(toy: Any) -> None:
    x = torch.rand(33, 5)

    def function(x: torch.Tensor) -> Any:
        exact = (functional.dropout(x, 0.4, True), torch.randint_like(x, 9), torch.bernoulli(x), torch.rand_like(x))
        return *exact, torch.randn(500), x.clone().exponential_(3), torch.randn(50, dtype=torch.float64)

    one, other = (seeded(compiled(function, device), x) for device in ("cpu", "toy:0"))
    for mine, theirs in zip(one[:4], other[:4], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one[4:], other[4:], strict=True):
        torch.testing.assert_close(mine, theirs)


# -- when they repeat, and when they do not


def test_manual_seed_repeats_and_calls_differ(device: str) -> None:
    run = compiled(lambda: (torch.rand(50), torch.rand(50)), device)
    first = seeded(run)
    second = run()
    assert not torch.equal(first[0], first[1])  # two operators of one graph
    assert not torch.equal(first[0], second[0])  # two calls
    again = seeded(run), run()
    assert all(map(torch.equal, (*first, *second), (*again[0], *again[1])))
    assert not torch.equal(seeded(run, seed=1)[0], first[0])


def test_the_state_of_pytorchs_generator_is_what_counts(device: str) -> None:
    run = compiled(lambda: torch.rand(20), device)
    seeded(run)
    state = torch.get_rng_state()
    drawn = run()
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(run(), drawn)
    after = torch.get_rng_state()
    with torch.random.fork_rng():
        run()
    assert torch.equal(torch.get_rng_state(), after)


def test_another_shape_is_planned_and_draws_anew(device: str) -> None:
    run = torch.compile(
        lambda x: functional.dropout(x, 0.5, True),
        backend="kagent",
        options={"device": device, "random_numbers": "device"},
        dynamic=True,
    )
    torch._dynamo.reset()
    for rows in (6, 9, 6, 6):
        first, second = (run(torch.ones(rows, 40)) for _ in range(2))
        assert first.shape == (rows, 40)
        assert not torch.equal(first, second)
        assert set(first.unique().tolist()) == {0.0, 2.0}


def test_a_program_without_random_operators_draws_no_seed(device: str) -> None:
    run = compiled(lambda x: x.relu() + 1, device)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_many_threads_at_once_draw_different_numbers(device: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    run = compiled(lambda: torch.rand(64), device)
    run()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: run(), range(40)))
    assert len({tuple(numbers.tolist()) for numbers in made}) == 40


# -- distributions

SIZE = 40_000


def spread(values: torch.Tensor, cumulative: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the Kolmogorov-Smirnov statistic times the root of the number of values: above 1.95 in 1 of 1000 cases."""
    ordered = values.double().flatten().sort().values
    count = len(ordered)
    expected = cumulative(ordered)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum(steps[1:] - expected, expected - steps[:-1]).max()) * math.sqrt(count)


def normal_cdf(x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return 0.5 * (1 + torch.erf((x - mean) / (std * math.sqrt(2))))


DISTRIBUTIONS: dict[str, tuple[Function, Function]] = {
    "rand": (torch.rand_like, lambda x: x),
    "uniform": (lambda x: x.clone().uniform_(-2, 3), lambda x: (x + 2) / 5),
    "randn": (torch.randn_like, normal_cdf),
    "normal_": (lambda x: x.clone().normal_(3, 2), lambda x: normal_cdf(x, 3, 2)),
    "normal of a tensor": (lambda x: torch.normal(x, 2.0), lambda x: normal_cdf(x, 1, 2)),
    "normal of two": (lambda x: torch.normal(x, x * 3), lambda x: normal_cdf(x, 1, 3)),
    "normal of a deviation": (lambda x: torch.normal(-1.0, x), lambda x: normal_cdf(x, -1, 1)),
    "log_normal": (lambda x: x.clone().log_normal_(0.5, 0.3), lambda x: normal_cdf(x.log(), 0.5, 0.3)),
    "exponential": (lambda x: x.clone().exponential_(2.5), lambda x: 1 - torch.exp(-2.5 * x)),
    "cauchy": (lambda x: x.clone().cauchy_(1, 2), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
    "rrelu": (lambda x: functional.rrelu(-x, 0.1, 0.4, training=True), lambda x: 1 - (-x - 0.1) / 0.3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(device: str, name: str, dtype: torch.dtype) -> None:
    draw, cumulative = DISTRIBUTIONS[name]
    values = seeded(compiled(draw, device), torch.ones(SIZE, dtype=dtype))
    assert values.dtype == dtype
    assert values.isfinite().all()
    assert spread(values, cumulative) < 1.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_of_normal_numbers_are_independent(device: str, dtype: torch.dtype) -> None:
    x, y = seeded(compiled(lambda: (torch.randn(SIZE, dtype=dtype), torch.randn(SIZE, dtype=dtype)), device))
    for one, other in ((x, y), (x[1:], x[:-1]), (x.square()[1:], x.square()[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 4 / math.sqrt(SIZE)


COUNTED: dict[str, tuple[Function, dict[float, float]]] = {
    "bernoulli.p": (lambda x: torch.bernoulli(x, 0.3), {0.0: 0.7, 1.0: 0.3}),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.2), {0.0: 0.8, 1.0: 0.2}),
    "bernoulli_.Tensor": (lambda x: x.clone().bernoulli_(x.double() * 0.4), {0.0: 0.6, 1.0: 0.4}),
    "dropout": (lambda x: functional.dropout(x, 0.25, True), {0.0: 0.25, float(torch.tensor(1.0) / 0.75): 0.75}),
    "randint": (lambda x: torch.randint_like(x, -1, 3), {float(n): 0.25 for n in range(-1, 3)}),
    "randint of booleans": (lambda x: torch.randint(0, 2, x.shape, dtype=torch.bool), {0.0: 0.5, 1.0: 0.5}),
    "geometric": (lambda x: x.clone().geometric_(0.5), {float(n): 0.5**n for n in range(1, 6)}),
    "geometric of int64": (lambda x: x.long().geometric_(0.5), {float(n): 0.5**n for n in range(1, 6)}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts(device: str, name: str) -> None:
    draw, wanted = COUNTED[name]
    values = seeded(compiled(draw, device), torch.ones(SIZE)).double()
    for value, probability in wanted.items():
        count = float((values == value).sum())
        deviation = math.sqrt(SIZE * probability * (1 - probability))
        assert abs(count - SIZE * probability) < 4 * deviation
    if "geometric" not in name:
        assert set(values.unique().tolist()) <= set(wanted)
    assert values.min() == min(wanted)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24)])
def test_uniform_numbers_have_the_types_own_bits(device: str, dtype: torch.dtype, bits: int) -> None:
    draw = compiled(lambda x: (torch.rand_like(x), x.clone().uniform_(2, 2.5), torch.randn_like(x)), device)
    unit, scaled, normal = seeded(draw, torch.empty(SIZE, dtype=dtype))
    assert unit.dtype == scaled.dtype == normal.dtype == dtype
    steps = unit.double() * 2**bits
    assert torch.equal(steps, steps.floor())
    assert (steps % 2 == 1).any()
    assert unit.min() >= 0
    assert unit.max() < 1
    assert scaled.min() >= 2
    assert scaled.max() < 2.5
    assert normal.isfinite().all()
    assert abs(float(normal.double().std()) - 1) < 0.02


def test_exponential_numbers_are_never_0(device: str) -> None:
    draw = compiled(lambda x: x.clone().exponential_(), device)
    for dtype in (torch.float32, torch.float16):
        values = seeded(draw, torch.empty(4 * SIZE, dtype=dtype))
        assert values.min() > 0
        assert values.isfinite().all()


# -- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
def test_native_dropout_multiplies_by_its_mask_as_atens_does(
    device: str, dtype: torch.dtype, p: float, train: bool | None
) -> None:
    x = torch.randn(40, 25).to(dtype)
    x[0, :3] = torch.tensor([math.inf, math.nan, -0.0])
    out, mask = seeded(compiled(lambda x: torch.native_dropout(x, p, train), device), x)
    assert mask.dtype == torch.bool
    if train is False:
        assert mask.all()
        torch.testing.assert_close(out, x, rtol=0, atol=0, equal_nan=True)
        return
    assert abs(float(mask.double().mean()) - (1 - p)) < 0.06
    scale = 0.0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(out, x.mul(mask).mul_(scale), rtol=0, atol=0, equal_nan=True)


def test_gradients_go_through_the_mask_that_was_drawn(device: str) -> None:
    x = torch.randn(60, 10, requires_grad=True)
    run = compiled(lambda x: functional.dropout(functional.dropout(x.exp(), 0.5, True).sin(), 0.2, True), device)
    out = run(x)
    out.sum().backward()
    assert x.grad is not None
    kept = out.detach() != 0
    wanted = torch.where(kept, (x.exp() * 2).cos() * 2 * x.exp() / 0.8, 0.0)
    torch.testing.assert_close(x.grad, wanted.detach())


def test_dropout_is_one_kernel_with_its_neighbours(toy: Any) -> None:
    run = compiled(lambda x, y: functional.dropout(functional.gelu(x), 0.1, True) + y, "toy:0")
    reports_before = len(reports("toy:0"))
    run(torch.randn(8, 64), torch.randn(8, 64))
    [report] = reports("toy:0")[reports_before:]
    assert (report.tasks, report.fallbacks) == (1, ())


def test_dropout_of_whole_channels_needs_no_empty_tensor(toy: Any) -> None:
    x = torch.ones(4, 50, 3, 3)
    out = compiled(lambda x: functional.dropout2d(x, 0.5, True), "toy:0")(x)
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert reports("toy:0")[-1].fallbacks == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_the_gradient_draws_the_same(device: str, reentrant: bool) -> None:
    weight = torch.randn(16, 16, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.relu(x @ weight), 0.5, True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)

    x = torch.randn(20, 16, requires_grad=True)
    out = compiled(function, device)(x)
    out.sum().backward()
    assert weight.grad is not None
    kept = (out != 0).float() * 2
    torch.testing.assert_close(weight.grad, (x.t() @ kept).detach())


def test_a_wrong_index_beside_dropout_is_what_eager_says(device: str) -> None:
    run = compiled(lambda table, index: functional.dropout(functional.embedding(index, table), 0.5, True), device)
    with pytest.raises(IndexError, match="index out of range"):
        run(torch.randn(4, 3), torch.tensor([1, 4]))


# -- shapes and strides


def test_tensors_of_every_kind(device: str) -> None:
    def function(x: torch.Tensor) -> Any:
        part = x[1:, ::2].t()
        return (
            torch.rand(()),
            torch.rand(0, 3),
            functional.dropout(x[:0], 0.5, True),
            torch.rand_like(part),
            functional.dropout(part, 0.5, True),
            functional.dropout(x[:, 1], 0.5, True)[::3],
        )

    x = torch.ones(12, 10)
    scalar, empty, none, like, dropped, sliced = seeded(compiled(function, device), x)
    assert scalar.shape == ()
    assert 0 <= float(scalar) < 1
    assert empty.shape == (0, 3)
    assert none.shape == (0, 10)
    wanted = function(x)
    for made, eagers in ((like, wanted[3]), (dropped, wanted[4]), (sliced, wanted[5])):
        assert (made.shape, made.stride()) == (eagers.shape, eagers.stride())
    assert len(like.unique()) > 50
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_written_in_place(device: str) -> None:
    def function(x: torch.Tensor) -> None:
        x[1].uniform_()
        x[2].bernoulli_(0.5)

    x = torch.full((4, 200), 7.0)
    seeded(compiled(function, device), x)
    assert (x[0] == 7).all()
    assert (x[3] == 7).all()
    assert len(x[1].unique()) > 150
    assert set(x[2].unique().tolist()) == {0.0, 1.0}


# -- one operator by itself

SINGLE: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten::rand", ([30, 4],), {"dtype": torch.float64}),
    ("aten::randn", ([50],), {}),
    ("aten::randint.low", (-3, 9, [40]), {}),
    ("aten::bernoulli.p", (torch.empty(40), 0.5), {}),
    ("aten::native_dropout", (torch.ones(40), 0.5, True), {}),
    ("aten::uniform_", (torch.empty(5, 6), 2.0, 3.0), {}),
    ("aten::normal.Tensor_float", (torch.ones(40), 2.0), {}),
]


@pytest.mark.parametrize(("signature", "args", "options"), SINGLE)
def test_one_operator(toy: Any, signature: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    def run() -> torch.Tensor:
        given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        made = kagent_core.run_op(signature, *given, device="toy:0", **options)
        return made[0] if isinstance(made, (tuple, list)) else made

    first, second, again = seeded(run), run(), seeded(run)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert reports("toy:0")[-1].fallbacks == ()


def test_a_generator_that_is_given(toy: Any) -> None:
    def run(generator: torch.Generator) -> torch.Tensor:
        made: torch.Tensor = kagent_core.run_op("aten::rand.generator", [40], generator=generator, device="toy:0")
        return made

    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, second = run(one), run(one)
    assert torch.equal(torch.get_rng_state(), state)  # PyTorch's own is not touched
    assert torch.equal(run(other), first)
    assert not torch.equal(first, second)
    assert reports("toy:0")[-1].fallbacks == ()


# -- the policy


def everything(x: torch.Tensor) -> Any:
    dropped = functional.dropout(x, 0.3, True)
    return dropped, torch.rand(5), torch.randn_like(x), torch.randint(7, (4,)), torch.bernoulli(x.sigmoid())


def test_eagers_own_numbers(toy: Any) -> None:
    check_against_eager(everything, torch.randn(6, 5), device="toy:0", random_numbers="eager")
    reasons = [fallback.reason for fallback in reports("toy:0", random_numbers="eager")[-1].fallbacks]
    assert reasons
    assert all('(random_numbers = "eager")' in reason for reason in reasons if "sigmoid" not in reason)


def test_the_cpu_draws_eagers_numbers_unless_told_otherwise() -> None:
    x = torch.randn(6, 5)
    check_against_eager(everything, x, device="cpu", random_numbers="auto")
    assert not torch.equal(seeded(compiled(everything, "cpu"), x)[0], seeded(everything, x)[0])


def test_without_generated_kernels_the_cpu_draws_eagers_numbers() -> None:
    options = {"generated_kernels": "off", "random_numbers": "device"}
    check_against_eager(everything, torch.randn(6, 5), device="cpu", **options)


def test_a_device_without_a_language_falls_back_with_the_reason(fake: Any) -> None:
    check_against_eager(everything, torch.randn(6, 5), device="fake:0", random_numbers="auto")
    told = {f.signature: f.reason for f in reports("fake:0", random_numbers="auto")[-1].fallbacks}
    assert "random numbers come from generated kernels, and the device has none" in told["aten::rand"]


def test_an_operator_that_is_placed_elsewhere_draws_there(toy: Any) -> None:
    options = {"placement": {"aten::rand": "cpu"}, "random_numbers": "auto"}
    run = compiled(lambda x: x + torch.rand(5), "toy:0", **options)
    torch.manual_seed(0)
    wanted = torch.rand(5)
    assert torch.equal(seeded(run, torch.zeros(5)), wanted)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: torch.randperm(9), "no lowering rule for aten::randperm"),
        (lambda x: torch.multinomial(x, 2), "no lowering rule for aten::multinomial"),
        (lambda x: torch.poisson(x), "no lowering rule for aten::poisson"),
    ],
)
def test_what_has_no_rule_falls_back_with_the_reason(toy: Any, function: Function, told: str) -> None:
    check_against_eager(function, torch.rand(4, 5), device="toy:0", random_numbers="auto")
    [fallback] = reports("toy:0", random_numbers="auto")[-1].fallbacks
    assert told in fallback.reason


def test_what_eager_refuses_is_refused_as_eager_does(device: str) -> None:
    run = compiled(lambda x: x.clone().exponential_(-1.0), device)
    with pytest.raises(RuntimeError, match=r"exponential_ expects lambda > 0\.0"):
        run(torch.ones(3))
