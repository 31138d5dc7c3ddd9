"""Random programs over views, broadcasting, reductions, mutation and mixed dtypes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import torch

from kagent_core.testing.compare import copy_arguments, telling_strides

Tensor = torch.Tensor
Step = Callable[[Sequence[Tensor], int, int, int], Tensor]
"""Makes a tensor of those that there are, by three numbers: which ones, which dimensions, which constants."""


def _pick(tensors: Sequence[Tensor], choice: int) -> Tensor:
    """Return one of some tensors."""
    return tensors[choice % len(tensors)]


def _dim_of(x: Tensor, choice: int) -> int:
    """Return one of the dimensions of a tensor."""
    return choice % x.dim()


def _unary(function: Callable[[Tensor], Tensor]) -> Step:
    """Make a step of a function of one tensor."""
    return lambda tensors, a, b, c: function(_pick(tensors, a))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Make a step of a function of two tensors."""
    return lambda tensors, a, b, c: function(_pick(tensors, a), _pick(tensors, b))


def _along(function: Callable[[Tensor, int], Tensor]) -> Step:
    """Make a step of a function of a tensor and a dimension."""
    return lambda tensors, a, b, c: function(x := _pick(tensors, a), _dim_of(x, b))


def _sliced(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = _pick(tensors, a)
    dim = _dim_of(x, b)
    return x.narrow(dim, c % x.shape[dim], 1 + (c // 7) % (x.shape[dim] - c % x.shape[dim]))


def _strided(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    return _pick(tensors, a)[b % 2 :: 1 + c % 3]


def _written_slice(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = _pick(tensors, a)
    x[b % 2 :: 1 + c % 2] = c % 5
    return x * 1


def _written_by(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = _pick(tensors, a)
    if not torch.compiler.is_compiling() and torch._debug_has_internal_overlap(x) == 1:  # eager comes first
        raise RuntimeError("eager takes this where a tensor is copied into itself; Dynamo says that it must not")
    x.copy_(_pick(tensors, b).to(x.dtype))  # torch 2.13 loses a 0-dim copy_ between dtypes in capture, aot_eager too
    return x + 1


def _added_in_place(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    return _pick(tensors, a).add_(_pick(tensors, b), alpha=1 + c % 3)


def _rows_at(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    """Rows of one tensor, at places that another one computes."""
    x, places = _pick(tensors, a), _pick(tensors, b)
    # contiguous: of transposed places, torch's meta kernel lays the result out otherwise than eager
    return x[((places.nan_to_num(0).long() + c) % x.shape[0]).contiguous()]


def _gathered(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = _pick(tensors, a)
    dim = _dim_of(x, b)
    return x.gather(dim, (x * 3).nan_to_num(0).long() % x.shape[dim])


def _scattered(tensors: Sequence[Tensor], a: int, b: int, c: int) -> Tensor:
    x = _pick(tensors, a)
    dim = _dim_of(x, b)
    return x.scatter_add(dim, (x * 3).nan_to_num(0).long() % x.shape[dim], x.flip(0))


STEPS: dict[str, Step] = {
    "gelu": _unary(lambda x: torch.nn.functional.gelu(x.float())),
    "silu": _unary(lambda x: torch.nn.functional.silu(x.float())),
    "tanh": _unary(torch.tanh),
    "abs": _unary(torch.abs),
    "bfloat": _unary(lambda x: x.bfloat16()),
    "small": _unary(lambda x: (x * 3).nan_to_num(0).clamp(-9, 9).to(torch.int8)),
    "clamp": lambda t, a, b, c: _pick(t, a).clamp(b % 4 - 2, c % 4),
    "divide": lambda t, a, b, c: _pick(t, a) / (1 + b % 3),
    "floor divide": lambda t, a, b, c: _pick(t, a) // (1 + b % 3),
    "remainder": lambda t, a, b, c: _pick(t, a) % (1 + b % 3),
    "power": lambda t, a, b, c: _pick(t, a).float() ** (b % 4),
    "less": _binary(torch.lt),
    "equal": _binary(torch.eq),
    "minimum": _binary(torch.minimum),
    "log softmax": _along(lambda x, d: x.float().log_softmax(d)),
    "layer norm": _unary(lambda x: torch.nn.functional.layer_norm(x.float(), x.shape[-1:])),
    "variance": _along(lambda x, d: x.float().var(d, correction=0)),
    "standardize": _along(lambda x, d: x.float() - x.float().mean(d, keepdim=True)),
    "prod": _along(lambda x, d: x.sign().prod(d)),
    "amin": _along(lambda x, d: x.amin(d, keepdim=True)),
    "argmin": _along(lambda x, d: x.argmin(d)),
    "any": _along(lambda x, d: x.any(d)),
    "all": _unary(torch.all),
    "pad": lambda t, a, b, c: torch.nn.functional.pad(_pick(t, a), (b % 3 - 1, c % 3)),
    "roll": _along(lambda x, d: x.roll(1, d)),
    "tril": lambda t, a, b, c: _pick(t, a).tril(b % 3 - 1),
    "repeat": _unary(lambda x: x.repeat(2, *[1] * (x.dim() - 1))),
    "rows at": _rows_at,
    "gather": _gathered,
    "scatter add": _scattered,
    "neg": _unary(lambda x: -x),
    "relu": _unary(torch.relu),
    "sin": _unary(torch.sin),
    "sign": _unary(torch.sign),
    "float": _unary(lambda x: x.float()),
    "long": _unary(lambda x: (x * 3).nan_to_num(0).clamp(-9, 9).long()),  # NaN has no integer
    "half": _unary(lambda x: x.half()),
    "positive": _unary(lambda x: x > 0),
    "softmax": _along(lambda x, d: x.float().softmax(d)),
    "add": _binary(torch.add),
    "mul": _binary(torch.mul),
    "sub": _binary(torch.sub),
    "maximum": _binary(torch.maximum),
    "where": lambda t, a, b, c: torch.where(_pick(t, a) > 0, _pick(t, b), _pick(t, c)),
    "mm": _binary(lambda x, y: x.float() @ y.float()),
    "sum": _along(lambda x, d: x.sum(d)),
    "sum all": _unary(torch.sum),
    "mean": _along(lambda x, d: x.float().mean(d, keepdim=True)),
    "amax": _along(lambda x, d: x.amax(d)),
    "argmax": _along(lambda x, d: x.argmax(d)),
    "max": _along(lambda x, d: x.max(d).values),
    "cumsum": _along(lambda x, d: x.cumsum(d)),
    "sort": _along(lambda x, d: x.sort(dim=d, stable=True).values),  # places of near ties follow from rounding
    "cat": lambda t, a, b, c: torch.cat([x := _pick(t, a), _pick(t, b).to(x.dtype)], _dim_of(x, c)),
    "stack": _binary(lambda x, y: torch.stack([x, y])),
    "clone": _unary(torch.clone),
    "transpose": _unary(lambda x: x.transpose(0, -1)),
    "reshape": _unary(lambda x: x.reshape(-1)),
    "view": _unary(lambda x: x.view(x.shape[0], -1)),
    "unsqueeze": _along(lambda x, d: x.unsqueeze(d)),
    "select": _along(lambda x, d: x.select(d, -1)),
    "expand": _unary(lambda x: x.unsqueeze(0).expand(3, *x.shape)),
    "flip": _along(lambda x, d: x.flip(d)),
    "diagonal": _unary(lambda x: x.diagonal()),
    "narrow": _sliced,
    "strided": _strided,
    "write a slice": _written_slice,
    "copy into": _written_by,
    "add in place": _added_in_place,
    "scale in place": lambda t, a, b, c: _pick(t, a).mul_(1 + b % 3),
}
"""What a random program is made of."""

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (0, 3), (3, 4), (4, 4), (4, 1), (2, 3, 4), (1, 3, 1))
"""Of inputs."""

DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
)
"""Of inputs; float32 is twice as likely."""

LAYOUTS = ("plain", "gaps", "transposed", "offset")
"""Of inputs, as `make_input` names them."""

NOT_CAPTURED_WHOLE = ("rows at",)
"""Steps at which Dynamo breaks a graph: it takes an index of no dimensions for a number that depends on data."""

LARGEST = 512
"""Elements of a result; what would have more is left out."""

MOST_STEPS = 30

Program = list[tuple[str, int, int, int]]
"""Names of `STEPS`, each with three numbers that choose tensors, dimensions and constants."""


def make_input(shape: Sequence[int], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Make an input: contiguous, transposed, with gaps, or with an offset."""
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


def run_program(program: Program, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Run steps in eager PyTorch and return every tensor, the arguments first."""
    tensors = list(arguments)
    for name, *choices in program:
        tensors.append(STEPS[name](tensors, *choices))
    return tensors


def valid_steps(arguments: Sequence[Tensor], program: Program) -> Program:
    """Return the steps that eager PyTorch takes, and whose results its meta kernels lay out as its real ones do.

    Strides that come from dimensions of size 1 make the two differ at times; capture knows what meta kernels say.
    """
    valid = Program()
    tensors, metas = _fresh(arguments, valid)
    for step in program:
        made, meta = _tried(step, tensors), _tried(step, metas)
        fits = made is not None and made.numel() <= LARGEST
        if made is not None and fits and (meta is None or telling_strides(meta) == telling_strides(made)):
            tensors.append(made)
            metas.append(made if meta is None else meta)
            valid.append(step)
        else:  # a step that is refused may have written
            tensors, metas = _fresh(arguments, valid)
    return valid


def _fresh(arguments: Sequence[Tensor], program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Run steps that are valid, on real tensors and on tensors without memory."""
    tensors = run_program(program, copy_arguments(arguments))
    metas = [argument.to("meta").as_strided(argument.shape, argument.stride()) for argument in arguments]
    for step, tensor in zip(program, tensors[len(arguments) :], strict=True):
        meta = _tried(step, metas)
        metas.append(tensor if meta is None else meta)
    return tensors, metas


def _tried(step: tuple[str, int, int, int], tensors: Sequence[Tensor]) -> Tensor | None:
    name, *choices = step
    try:
        return STEPS[name](tensors, *choices)
    except (RuntimeError, IndexError, TypeError, ZeroDivisionError, NotImplementedError):
        return None


def random_program(seed: int) -> tuple[list[Tensor], Program]:
    """Return inputs and steps that eager PyTorch takes and Dynamo captures, the same ones for the same seed."""
    drawn = random.Random(seed)
    arguments = [
        make_input(drawn.choice(SHAPES), drawn.choice(DTYPES), drawn.choice(LAYOUTS), drawn.randrange(10))
        for _ in range(drawn.randint(2, 3))
    ]
    names = [name for name in STEPS if name not in NOT_CAPTURED_WHOLE]
    count = drawn.randint(5, MOST_STEPS)
    numbers = functools.partial(drawn.randrange, 100)
    program = [(drawn.choice(names), numbers(), numbers(), numbers()) for _ in range(count)]
    return arguments, valid_steps(arguments, program)
