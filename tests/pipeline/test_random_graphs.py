"""Random programs over views, broadcasting, reductions, mutation and mixed dtypes: kagent gives what eager gives.

``RANDOM_GRAPHS`` sets how many are tried on each device, other ones each time; by default 100, always the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core.testing import FakeDevice, FakeRuntime
from kagent_core.testing.compare import assert_same, copy_arguments

from .forced import generated_everywhere

EXAMPLES = int(os.environ.get("RANDOM_GRAPHS", "100"))
ALWAYS_THE_SAME = "RANDOM_GRAPHS" not in os.environ
LARGEST = 512  # elements

Tensor = torch.Tensor
Step = Callable[[Sequence[Tensor], int, int, int], Tensor]


def pick(tensors: Sequence[Tensor], choice: int) -> Tensor:
    return tensors[choice % len(tensors)]


def dim_of(x: Tensor, choice: int) -> int:
    return choice % x.dim()


def unary(function: Callable[[Tensor], Tensor]) -> Step:
    return lambda tensors, a, b, c: function(pick(tensors, a))


def binary(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
    return lambda tensors, a, b, c: function(pick(tensors, a), pick(tensors, b))


def along(function: Callable[[Tensor, int], Tensor]) -> Step:
    return lambda tensors, a, b, c: function(x := pick(tensors, a), dim_of(x, b))


def sliced(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = pick(tensors, a)
    dim = dim_of(x, b)
    return x.narrow(dim, c % x.shape[dim], 1 + (c // 7) % (x.shape[dim] - c % x.shape[dim]))


def strided(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    return pick(tensors, a)[b % 2 :: 1 + c % 3]


def written_slice(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = pick(tensors, a)
    x[b % 2 :: 1 + c % 2] = c % 5
    return x * 1


def written_by(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = pick(tensors, a)
    if torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError("eager takes this where a tensor is copied into itself; Dynamo says that it must not")
    x.copy_(pick(tensors, b).to(x.dtype))  # torch 2.13 loses a 0-dim copy_ between dtypes in capture, aot_eager too
    return x + 1


def added_in_place(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    return pick(tensors, a).add_(pick(tensors, b), alpha=1 + c % 3)


def rows_at(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    """Rows of one tensor, at places that another one computes."""
    x, places = pick(tensors, a), pick(tensors, b)
    # contiguous: of transposed places, torch's meta kernel lays the result out otherwise than eager
    return x[((places.nan_to_num(0).long() + c) % x.shape[0]).contiguous()]


def gathered(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = pick(tensors, a)
    dim = dim_of(x, b)
    return x.gather(dim, (x * 3).nan_to_num(0).long() % x.shape[dim])


def scattered(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = pick(tensors, a)
    dim = dim_of(x, b)
    return x.scatter_add(dim, (x * 3).nan_to_num(0).long() % x.shape[dim], x.flip(0))


STEPS: dict[str, Step] = {
    "gelu": unary(lambda x: torch.nn.functional.gelu(x.float())),
    "silu": unary(lambda x: torch.nn.functional.silu(x.float())),
    "tanh": unary(torch.tanh),
    "abs": unary(torch.abs),
    "bfloat": unary(lambda x: x.bfloat16()),
    "small": unary(lambda x: (x * 3).nan_to_num(0).clamp(-9, 9).to(torch.int8)),
    "clamp": lambda t, a, b, c: pick(t, a).clamp(b % 4 - 2, c % 4),
    "divide": lambda t, a, b, c: pick(t, a) / (1 + b % 3),
    "floor divide": lambda t, a, b, c: pick(t, a) // (1 + b % 3),
    "remainder": lambda t, a, b, c: pick(t, a) % (1 + b % 3),
    "power": lambda t, a, b, c: pick(t, a).float() ** (b % 4),
    "less": binary(torch.lt),
    "equal": binary(torch.eq),
    "minimum": binary(torch.minimum),
    "log softmax": along(lambda x, d: x.float().log_softmax(d)),
    "layer norm": unary(lambda x: torch.nn.functional.layer_norm(x.float(), x.shape[-1:])),
    "variance": along(lambda x, d: x.float().var(d, correction=0)),
    "standardize": along(lambda x, d: x.float() - x.float().mean(d, keepdim=True)),
    "prod": along(lambda x, d: x.sign().prod(d)),
    "amin": along(lambda x, d: x.amin(d, keepdim=True)),
    "argmin": along(lambda x, d: x.argmin(d)),
    "any": along(lambda x, d: x.any(d)),
    "all": unary(torch.all),
    "pad": lambda t, a, b, c: torch.nn.functional.pad(pick(t, a), (b % 3 - 1, c % 3)),
    "roll": along(lambda x, d: x.roll(1, d)),
    "tril": lambda t, a, b, c: pick(t, a).tril(b % 3 - 1),
    "repeat": unary(lambda x: x.repeat(2, *[1] * (x.dim() - 1))),
    "rows at": rows_at,
    "gather": gathered,
    "scatter add": scattered,
    "neg": unary(lambda x: -x),
    "relu": unary(torch.relu),
    "sin": unary(torch.sin),
    "sign": unary(torch.sign),
    "float": unary(lambda x: x.float()),
    "long": unary(lambda x: (x * 3).nan_to_num(0).clamp(-9, 9).long()),  # NaN has no integer
    "half": unary(lambda x: x.half()),
    "positive": unary(lambda x: x > 0),
    "softmax": along(lambda x, d: x.float().softmax(d)),
    "add": binary(torch.add),
    "mul": binary(torch.mul),
    "sub": binary(torch.sub),
    "maximum": binary(torch.maximum),
    "where": lambda t, a, b, c: torch.where(pick(t, a) > 0, pick(t, b), pick(t, c)),
    "mm": binary(lambda x, y: x.float() @ y.float()),
    "sum": along(lambda x, d: x.sum(d)),
    "sum all": unary(torch.sum),
    "mean": along(lambda x, d: x.float().mean(d, keepdim=True)),
    "amax": along(lambda x, d: x.amax(d)),
    "argmax": along(lambda x, d: x.argmax(d)),
    "max": along(lambda x, d: x.max(d).values),
    "cumsum": along(lambda x, d: x.cumsum(d)),
    "sort": along(lambda x, d: x.sort(d, stable=True).indices),
    "cat": lambda t, a, b, c: torch.cat([x := pick(t, a), pick(t, b).to(x.dtype)], dim_of(x, c)),
    "stack": binary(lambda x, y: torch.stack([x, y])),
    "clone": unary(torch.clone),
    "transpose": unary(lambda x: x.transpose(0, -1)),
    "reshape": unary(lambda x: x.reshape(-1)),
    "view": unary(lambda x: x.view(x.shape[0], -1)),
    "unsqueeze": along(lambda x, d: x.unsqueeze(d)),
    "select": along(lambda x, d: x.select(d, -1)),
    "expand": unary(lambda x: x.unsqueeze(0).expand(3, *x.shape)),
    "flip": along(lambda x, d: x.flip(d)),
    "diagonal": unary(lambda x: x.diagonal()),
    "narrow": sliced,
    "strided": strided,
    "write a slice": written_slice,
    "copy into": written_by,
    "add in place": added_in_place,
    "scale in place": lambda t, a, b, c: pick(t, a).mul_(1 + b % 3),
}

shapes = st.sampled_from([(), (1,), (5,), (0, 3), (3, 4), (4, 4), (4, 1), (2, 3, 4), (1, 3, 1)])
dtypes = st.sampled_from(
    [torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.bool]
)
steps = st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))


def make(shape, dtype, layout, seed):
    """An input: contiguous, transposed, with gaps, or with an offset."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, (*shape, 2), generator=generator).to(dtype)
    if layout == "gaps":
        return values[..., 1]
    plain = values[..., 0].clone(memory_format=torch.contiguous_format)
    if layout == "transposed" and len(shape) > 1:
        return plain.transpose(0, -1)
    if layout == "offset" and shape:
        return torch.cat([plain, plain])[shape[0] :]
    return plain


inputs = st.lists(
    st.builds(make, shapes, dtypes, st.sampled_from(["plain", "gaps", "transposed", "offset"]), st.integers(0, 9)),
    min_size=2,
    max_size=3,
)


def run(program, arguments):
    """Run steps in eager PyTorch and return every tensor, the arguments first."""
    tensors = list(arguments)
    for name, *choices in program:
        tensors.append(STEPS[name](tensors, *choices))
    return tensors


def valid_steps(arguments, program):
    """The steps that eager PyTorch takes. After one that it refuses, which may have written, all is run anew."""
    tensors, valid = run([], copy_arguments(arguments)), []
    for name, *choices in program:
        try:
            made = STEPS[name](tensors, *choices)
        except (RuntimeError, IndexError, TypeError, ZeroDivisionError, NotImplementedError):
            made = None
        if made is not None and made.numel() <= LARGEST:
            tensors.append(made)
            valid.append((name, *choices))
        else:
            tensors = run(valid, copy_arguments(arguments))
    return valid


def check(arguments, program, device):
    program = valid_steps(arguments, program)
    note(f"valid steps: {program}")

    def function(*given):
        return run(program, given)[len(given) :]

    torch._dynamo.reset()
    compiled = kagent_core.compile(function, device=device, logs="error")
    types = {tensor.dtype for tensor in run(program, copy_arguments(arguments))}
    with torch.no_grad(), generated_everywhere(made_from=types):
        for _ in range(2):
            mine, theirs = copy_arguments(arguments), copy_arguments(arguments)
            want, got = function(*theirs), compiled(*mine)
            assert_same(got, want, "result", every_stride=False, made_from=types)
            assert_same(mine, theirs, "arguments", made_from=types)


suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=EXAMPLES, derandomize=ALWAYS_THE_SAME, deadline=None, suppress_health_check=suppressed)
@given(inputs, st.lists(steps, min_size=5, max_size=30))
def test_on_the_cpu(arguments, program):
    check(arguments, program, "cpu")


@settings(max_examples=EXAMPLES, derandomize=ALWAYS_THE_SAME, deadline=None, suppress_health_check=suppressed)
@given(inputs, st.lists(steps, min_size=5, max_size=20), st.integers(1, 3))
def test_across_a_device_and_the_fallback(arguments, program, streams):
    """Most operators fall back, so every buffer wanders between host and device memory."""
    with kagent_core.use_plugin(FakeDevice(runtime=FakeRuntime(streams=streams, delay_ms=0.1))):
        check(arguments, program, "fake:0")
