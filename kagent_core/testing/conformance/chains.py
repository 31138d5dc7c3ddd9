"""Short programs that a fusing device makes few kernels of, each of one kind of neighbourhood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0)
"""Values that kernels like to get wrong."""

INPUTS = ("plain", "strided", "special")
"""How inputs lie, and what is in them: contiguous; with gaps and an offset; with `SPECIAL` values in the first one."""

FINITE = ("plain", "strided")

_INDICES = 4  # more than the largest index


@dataclass(frozen=True)
class Chain:
    """A function, and what it takes.

    Attributes
    ----------
    name
        Of the case.
    family
        Of the case.
    function
        Takes tensors.
    shapes
        Of its tensors: of floating-point numbers, or, where the shape begins with ``"index"`` or ``"mask"``, of small
        integers or booleans.
    kinds
        Those of `INPUTS` for which eager PyTorch's results have a meaning.
    """

    name: str
    family: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    kinds: tuple[str, ...] = INPUTS

    def inputs(self, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
        """Make inputs of one of the kinds in `INPUTS`; the same seed gives the same ones."""
        generator = torch.Generator().manual_seed(seed)
        made = [_made(shape, kind == "strided", dtype, generator) for shape in self.shapes]
        if kind == "special":  # weights and biases that are infinite would ask in which order products are added
            flat = made[0].view(-1)
            for position, value in enumerate(SPECIAL):
                flat[(7 * position + 3) % flat.numel()] = value
        return tuple(made)

    @property
    def source(self) -> str:
        """The function as source, without what registers it here."""
        text = inspect.getsource(self.function)
        return text[text.index("def ") :].replace("def _", "def ").replace(": Tensor", "").replace(" -> Any:", ":")


CHAINS: list[Chain] = []


def _chain(
    family: str, *shapes: tuple[Any, ...], kinds: tuple[str, ...] = INPUTS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CHAINS.append(Chain(function.__name__.replace("_", " ").strip(), family, function, shapes, kinds))
        return function

    return register


def _made(shape: Sequence[Any], strided: bool, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    meaning = shape[0] if shape and isinstance(shape[0], str) else None
    sizes = tuple(shape[1:]) if meaning else tuple(shape)
    wide = (*sizes, 2) if strided else sizes  # every second number, from the second on
    if meaning == "index":
        made = torch.randint(0, _INDICES, wide, generator=generator)
    elif meaning == "mask":
        made = torch.randint(0, 2, wide, generator=generator) > 0
    else:
        made = torch.randn(wide, generator=generator).to(dtype)
    return made[..., 1] if strided else made


# -- pointwise


@_chain("pointwise", (4, 6), (4, 6))
def _pointwise_chain(x: Tensor, y: Tensor) -> Any:
    return ((x * 2 + y).sigmoid() - 0.5) * y.tanh()


@_chain("pointwise", (4, 6), (6,), (4, 1), ())
def _broadcasting_chain(x: Tensor, row: Tensor, column: Tensor, scale: Tensor) -> Any:
    return (x + row) * column.exp() / (scale.abs() + 1)


@_chain("pointwise", (5, 7), (5, 7), ("mask", 5, 7))
def _selecting_chain(x: Tensor, y: Tensor, mask: Tensor) -> Any:
    return torch.where(mask, torch.nn.functional.silu(x), y.clamp(-0.5, 0.5)).maximum(y).relu()


@_chain("pointwise", (4, 6), (4, 6))
def _extremes(x: Tensor, y: Tensor) -> Any:
    return x.maximum(y) * 2, x.minimum(y).clamp(-1, 1), torch.relu(x + y), (x * 2).amax(-1)


@_chain("pointwise", (4, 6), ("index", 4, 6))
def _mixed_dtypes(x: Tensor, places: Tensor) -> Any:
    halves = x.half() * 3 + places
    return halves, (x > places - 1).float() + halves, places // 2 + places % 3


@_chain("pointwise", (4, 6))
def _many_readers(x: Tensor) -> Any:
    y = torch.exp(x) + 1
    return y * 2, y - x, y.sqrt()


@_chain("pointwise", ())
def _no_dimensions(x: Tensor) -> Any:
    return (x + 1).square().neg() * x


# -- reductions


@_chain("reduction", (4, 6), (4, 6))
def _reduction_with_prologue(x: Tensor, y: Tensor) -> Any:
    return (x * y + 1).sum(-1)


@_chain("reduction", (4, 6))
def _reduction_with_epilogue(x: Tensor) -> Any:
    return torch.tanh(x.mean(0) * 2 + 1)


@_chain("reduction", (4, 6))
def _reduction_between(x: Tensor) -> Any:
    return x - (x * x).mean(-1, keepdim=True).sqrt()


@_chain("reduction", (3, 4, 5))
def _reduction_over_two_dimensions(x: Tensor) -> Any:
    return (x - 1).abs().amax((0, 2)) + x.var((0, 2), correction=0)


@_chain("reduction", (4, 6))
def _reduction_of_everything(x: Tensor) -> Any:
    return x / (x.abs().sum() + 1), x.relu().max()


@_chain("reduction", (4, 6))
def _place_of_the_largest(x: Tensor) -> Any:
    return x.relu().argmax(-1), (x * 2).min(0).values


@_chain("reduction", (4, 6))
def _sum_of_a_comparison(x: Tensor) -> Any:
    return (x > 0).sum(-1), (x > 0).any(0), (x == x).all()


@_chain("reduction", (4, 6))
def _scan(x: Tensor) -> Any:
    return (x * 0.5).cumsum(-1).neg()


# -- softmax and norms


@_chain("softmax", (2, 4, 6), ("mask", 2, 1, 6))
def _masked_softmax(x: Tensor, mask: Tensor) -> Any:
    return (x * 0.5).masked_fill(mask, -1e4).softmax(-1)


@_chain("softmax", (4, 6))
def _softmax_along_columns(x: Tensor) -> Any:
    return (x + 1).softmax(0) * 2


@_chain("softmax", (4, 6), ("index", 4))
def _log_softmax_and_loss(x: Tensor, labels: Tensor) -> Any:
    return torch.nn.functional.nll_loss((x * 2).log_softmax(-1), labels)


@_chain("normalization", (4, 6), (4, 6), (6,), (6,))
def _residual_and_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.layer_norm(x + residual, (6,), weight, bias)


@_chain("normalization", (4, 6), (6,))
def _rms_norm(x: Tensor, weight: Tensor) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@_chain("normalization", (2, 4, 5, 5), (4,), (4,), (4,), (4,))
def _batch_norm_and_relu(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.batch_norm(x, mean, variance.abs() + 0.5, weight, bias).relu()


@_chain("normalization", (2, 4, 5), (4,), (4,))
def _group_norm_and_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2, weight, bias))


# -- products


# eager's gelu of infinity is infinite or NaN, by how many elements there are
@_chain("products", (4, 6), (5, 6), (5,), kinds=FINITE)
def _linear_and_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))


@_chain("products", (4, 6), (6, 6), (4, 6))
def _product_and_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Any:
    return torch.relu(x * 2) @ weight.t() + residual


@_chain("products", (2, 4, 6), (2, 4, 6), (2, 4, 6))
def _scores_softmax_values(queries: Tensor, keys: Tensor, values: Tensor) -> Any:
    return ((queries @ keys.transpose(-1, -2)) * 0.4).softmax(-1) @ values


@_chain("products", (2, 3, 6, 6), (4, 3, 3, 3), (4,))
def _convolution_and_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.conv2d(x, weight, bias, padding=1).relu() + 1


# -- views


@_chain("views", (4, 6), (6, 4))
def _transposed_between(x: Tensor, y: Tensor) -> Any:
    return ((x * 2).t() + y).t().relu()


@_chain("views", (4, 6))
def _slices_and_cat(x: Tensor) -> Any:
    y = x * 2
    return torch.cat([y[1:, ::2], y[:-1, 1::2]], 1) + 1


@_chain("views", (2, 3, 4))
def _permuted_and_reshaped(x: Tensor) -> Any:
    return (x + 1).permute(2, 0, 1).reshape(4, 6).tanh()


@_chain("views", (4, 6))
def _expanded_and_flipped(x: Tensor) -> Any:
    return x.exp().unsqueeze(0).expand(3, 4, 6).flip(-1) * 2, x.relu().diagonal() + 1


@_chain("views", (4, 6), ("index", 5))
def _rows_by_index(table: Tensor, places: Tensor) -> Any:
    return (table * 2)[places].relu() + 1


# -- mutation


@_chain("mutation", (4, 6))
def _written_in_place(x: Tensor) -> Any:
    y = x.relu()
    x.add_(1)
    return x * y


@_chain("mutation", (4, 6))
def _part_written_in_place(x: Tensor) -> Any:
    x[1:].mul_(2)
    x[:, 0] = 3
    return x.sum(0)


@_chain("mutation", (4, 6), (6,))
def _running_mean(x: Tensor, mean: Tensor) -> Any:
    mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x - mean


@_chain("mutation", (4, 6), (4, 6))
def _copied_into(x: Tensor, y: Tensor) -> Any:
    y.t().copy_((x * 2).t())
    return y.sigmoid()
