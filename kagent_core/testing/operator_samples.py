"""Calls of one operator with real arguments, from torch's own operator database.

The database has samples of Python functions; which overloads these dispatch is found by running them. `operator_calls`
notes the calls of one overload, and `variants` lays their tensors out otherwise and gives them other values.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kagent_core.capture.schemas import resolve_overload, signature_of
from kagent_core.errors import KagentError, SignatureError
from kagent_core.testing.compare import copy_arguments

AS_IT_CAME = "as it came"
"""The variant of a call that the database has itself."""

PADDING = 64
"""Elements behind every tensor that a call is given, and before those of the variant ``surrounded``."""

_MOST_TRIED = 100  # samples of an entry that are run to find those that call an overload
_PAD_INTEGER = 113  # within uint8; no size or index of a sample


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator.

    Attributes
    ----------
    overload
        torch's ``OpOverload``.
    args, kwargs
        As the operator takes them. A caller must not write the tensors: `copied` gives it its own.
    sample
        Where it comes from: entry, dtype and number of the sample.
    variant
        What was done to it; `AS_IT_CAME` where nothing was.
    """

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sample: str
    variant: str = AS_IT_CAME

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments that the caller may write, with the strides, offsets and gaps of these.

        Behind each tensor are `PADDING` elements of memory that belongs to nobody: NaN, or a number that is no size.
        """
        copies = self._mapped(_with_slack)
        return copies["args"], copies["kwargs"]

    def with_tensors(self, change: Callable[[torch.Tensor], Any], variant: str) -> OperatorCall:
        """Return the call with other tensors."""
        return replace(self, **self._mapped(change), variant=variant)

    def _mapped(self, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        leaf_by_leaf = lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf
        return {"args": pytree.tree_map(leaf_by_leaf, self.args), "kwargs": pytree.tree_map(leaf_by_leaf, self.kwargs)}

    def __str__(self) -> str:
        return f"{self.sample}, {self.variant}"


def operator_calls(signature: str, dtypes: Iterable[torch.dtype], samples: int = 10) -> list[OperatorCall]:
    """Return calls of one overload that samples of torch's operator database make, for each dtype.

    Parameters
    ----------
    signature
        The exact overload, such as ``aten::gelu`` or ``aten::relu_``.
    dtypes
        Of the samples; some of their tensors may have others.
    samples
        Most samples per entry of the database and dtype.

    Raises
    ------
    SignatureError
        When the installed torch has no such operator.
    KagentError
        When the database cannot be imported, or none of its samples calls the operator.
    """
    overload = resolve_overload(signature)
    wanted = list(dtypes)
    database = _operator_database()
    tried = _Tried()
    # under inference_mode operators that PyTorch takes apart arrive whole, and nothing runs backward
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # the database has deprecated functions, too
        named = [entry for entry in database if _goes_by_name(entry, overload)]
        found = _calls_of(named, overload, wanted, samples, tried)
        found = found or _calls_of_functional(named, overload, wanted, samples, tried)
        if not found and _why_never(overload) is None:
            calling = [entry for entry in database if _first_calls(entry, overload)]  # which takes a minute
            found = _calls_of(calling, overload, wanted, samples, tried)
    if found:
        return found
    raise KagentError(
        f"no sample of torch's operator database calls {signature} ({tried})",
        hint=_why_never(overload) or "compare the kernel with PyTorch by hand: kagent_core.run_op runs one operator",
    )


@dataclass
class _Tried:
    """The samples that were run in search of calls, for the error when there are none."""

    samples: int = 0
    refused: int = 0
    first_refusal: str = ""

    def refuse(self, entry: Any, error: Exception) -> None:
        self.refused += 1
        self.first_refusal = self.first_refusal or f"'{_full_name(entry)}': {type(error).__name__}: {error}"

    def __str__(self) -> str:
        told = f"{self.samples} samples with its name were run"
        return f"{told}, {self.refused} of which failed, the first of {self.first_refusal}" if self.refused else told


def first_samples(entry: Any, dtype: torch.dtype, count: int, requires_grad: bool = False) -> list[Any]:
    """Return the first samples of an entry of the database, on the CPU: the same ones every time."""
    random.seed(0)
    torch.manual_seed(0)
    modules = [sys.modules.get(f"torch.testing._internal.{name}") for name in ("common_utils", "opinfo.core")]
    with contextlib.ExitStack() as patches:
        for module in modules:  # both search the stack for a unittest that might run, for longer than samples take
            if hasattr(module, "extract_test_fn"):
                patches.enter_context(mock.patch.object(module, "extract_test_fn", return_value=None))
        return list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=requires_grad), count))


def _operator_database() -> list[Any]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise KagentError(
            f"torch's operator database, which has the samples, needs the package '{error.name}', which is not there",
            hint=f"pip install {error.name}",
        ) from error
    return list(op_db)


def _why_never(overload: Any) -> str | None:
    if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return f"PyTorch takes {signature_of(overload)} apart into other operators before any device sees it"
    return None


# -- which samples call it


def _calls_of(
    entries: Sequence[Any], overload: Any, dtypes: Sequence[torch.dtype], samples: int, tried: _Tried
) -> list[OperatorCall]:
    pairs = itertools.product(entries, dtypes)
    recorded = (_recorded(e, overload, dtype, samples, tried) for e, dtype in pairs if e.supports_dtype(dtype, "cpu"))
    return [call for calls in recorded for call in calls]


def _calls_of_functional(
    entries: Sequence[Any], overload: Any, dtypes: Sequence[torch.dtype], samples: int, tried: _Tried
) -> list[OperatorCall]:
    """Return calls of an operator that writes its first argument, made of those of the one that writes none."""
    name, _, rest = signature_of(overload).partition(".")
    if not name.endswith("_"):
        return []
    try:
        functional = resolve_overload(f"{name.removesuffix('_')}.{rest}" if rest else name.removesuffix("_"))
    except SignatureError:
        return []
    return [replace(call, overload=overload) for call in _calls_of(entries, functional, dtypes, samples, tried)]


def _goes_by_name(entry: Any, overload: Any) -> bool:
    """Whether an entry is named as the operator, so that the others need not be tried."""
    base = overload._schema.name.partition("::")[2].strip("_")
    wanted = {base, base.removesuffix("_backward"), base.removeprefix("native_"), base.removesuffix("_copy")}
    names = {entry.name, entry.name.rpartition(".")[2], entry.aten_name, *(alias.name for alias in entry.aliases)}
    return bool(wanted & names) or any(_says_all_of(base, name) for name in names)


def _says_all_of(base: str, name: str) -> bool:
    """Whether an operator's name has every word of a long name, as those of attention for some device do."""
    words = name.split("_")
    return len(words) > 2 and set(words) <= set(base.split("_"))


def _first_calls(entry: Any, overload: Any) -> bool:
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if entry.supports_dtype(d, "cpu")), None)
    return dtype is not None and bool(_recorded(entry, overload, dtype, 1, _Tried(), most=2))


def _recorded(
    entry: Any, overload: Any, dtype: torch.dtype, samples: int, tried: _Tried, most: int = _MOST_TRIED
) -> list[OperatorCall]:
    """Run an entry's samples, until so many of them have called an overload, and return these calls."""
    name, base = _full_name(entry), overload._schema.name
    in_place = base.endswith("_") and not base.endswith("__")
    backward = "backward" in base and entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    function = entry.inplace_variant if in_place else entry.op
    if function is None or ("backward" in base and not backward):
        return []
    found: list[OperatorCall] = []
    try:
        taken = first_samples(entry, dtype, most, backward)
    except Exception as error:  # noqa: BLE001  an entry whose own samples cannot be made has none
        tried.refuse(entry, error)
        return []
    for number, sample in enumerate(taken):
        tried.samples += 1
        with torch.set_grad_enabled(backward), _Recorder(overload) as recorder:
            try:
                given = sample.input.clone() if in_place else sample.input
                results = function(given, *sample.args, **sample.kwargs)
                if backward:
                    _run_backward(results)
            except Exception as error:  # noqa: BLE001  a sample that eager PyTorch refuses has nothing to compare with
                tried.refuse(entry, error)
                continue
        origin = f"sample {number} of '{name}' in {str(dtype).removeprefix('torch.')}"
        found += [OperatorCall(overload, args, kwargs, origin) for args, kwargs in recorder.found]
        samples -= bool(recorder.found)
        if samples == 0:
            break
    return found


def _full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def _run_backward(results: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.randn_like(leaf) for leaf in leaves])


class _Recorder(TorchDispatchMode):
    """Notes the arguments of every call of one overload."""

    def __init__(self, overload: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overload = overload
        self.found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self._overload and _can_be_copied((args, kwargs)):
            copied, by_name = copy_arguments(pytree.tree_map(_detached, (args, kwargs)))
            self.found.append((copied, by_name))
        return func(*args, **kwargs)


def _can_be_copied(arguments: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return all(t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized for t in tensors)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


# -- variants


def variants(call: OperatorCall) -> Iterator[OperatorCall]:
    """Yield a call as it came, and then with its tensors laid out otherwise and with other values.

    Not every variant makes sense for every operator: the caller skips those that eager PyTorch refuses.
    """
    yield call
    for name, change in _EACH_TENSOR.items():
        changed = [change(tensor) is not tensor for tensor in call.tensors]
        if any(changed):
            yield call.with_tensors(change, name)
    if len(call.tensors) > 1:  # sizes that were equal by chance no longer are
        for number, tensor in enumerate(call.tensors):
            yield from (_narrowed(call, number, dim, 1) for dim in range(tensor.dim()) if tensor.shape[dim] > 1)
            yield from (_narrowed(call, number, dim, tensor.shape[dim]) for dim in range(min(tensor.dim(), 1)))


def _narrowed(call: OperatorCall, number: int, dim: int, count: int) -> OperatorCall:
    chosen = call.tensors[number]
    kept = chosen.shape[dim] - count
    how = f"tensor {number} with {kept} in place of {chosen.shape[dim]} in dimension {dim}"
    return call.with_tensors(lambda tensor: tensor.narrow(dim, 0, kept) if tensor is chosen else tensor, how)


def _with_slack(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with what lies in its storage, into a storage with room behind that."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    whole = _padding((count + PADDING,), tensor.dtype)
    whole[:count] = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
    twin = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        twin = torch._conj(twin)
    return torch._neg_view(twin) if tensor.is_neg() else twin


def _surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor into the middle of other memory."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = _padding((span + 2 * PADDING,), tensor.dtype)
    moved = flat.as_strided(tensor.shape, tensor.stride(), PADDING)
    return _filled(moved, tensor)


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    wide = _padding((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor.dtype)
    return _filled(wide[..., ::2], tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.numel() < 2:
        return tensor
    other_way = tensor.resolve_conj().resolve_neg().transpose(0, -1)
    return other_way.clone(memory_format=torch.contiguous_format).transpose(0, -1)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return tensor
    return tensor[:1].expand(tensor.shape)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if tensor.dim() > 0 and tensor.shape[0] > 0 else tensor


def _with_special_floats(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    limits = torch.finfo(tensor.dtype)
    return _scattered(tensor, [math.nan, math.inf, -math.inf, -0.0, limits.max, limits.tiny])


def _with_extreme_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or tensor.numel() == 0:
        return tensor
    limits = torch.iinfo(tensor.dtype)
    return _scattered(tensor, [limits.max, limits.min, 0, max(limits.min, -1)])


_EACH_TENSOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "surrounded": _surrounded,
    "every second element": _every_second,
    "transposed in memory": _transposed,
    "expanded": _expanded,
    "empty": _emptied,
    "NaN and infinities": _with_special_floats,
    "extreme integers": _with_extreme_integers,
}


def _padding(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    value = math.nan if dtype.is_floating_point or dtype.is_complex else True if dtype is torch.bool else _PAD_INTEGER
    return torch.full(shape, value, dtype=dtype)


def _filled(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
        if target.numel():  # an expanded tensor: each of its elements once
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
            target[once] = source[once]
        return target
    target.copy_(source)
    return target


def _scattered(tensor: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Put values in the place of every second element, in turn."""
    flat = tensor.reshape(-1).clone()
    places = flat[::2]
    repeated = torch.tensor(values, dtype=tensor.dtype).repeat(-(-len(places) // len(values)))
    flat[::2] = repeated[: len(places)]
    twin: torch.Tensor = copy_arguments(tensor)
    return _filled(twin, flat.reshape(tensor.shape))
