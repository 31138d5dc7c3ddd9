"""Every operator in torch's own operator database equals eager PyTorch, but for those that are listed here.

The database's first float32 sample of each operator runs in eager PyTorch and through ``backend="kagent"``. Values,
dtypes, shapes, strides, the arguments afterwards and the state of the random number generator are compared. Every graph
runs a second time with generated kernels wherever they can be (`forced`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kagent_core.backend import _Capture
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.single import run_overload
from kagent_core.testing.compare import assert_as_exact, assert_same, copy_arguments

from .forced import generated_everywhere
from .models import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch deprecates is in its database as well

CHUNKS = 16
ENTRIES = 677
"""Entries of the database that support float32 on the CPU, in torch 2.13."""
EQUAL = 666
"""How many of them equal eager."""

UNINITIALIZED = "its result is uninitialized memory: only dtype, shape and strides have a meaning"
NEEDS_GPU = "torch's jiterator compiles it on a GPU; eager PyTorch refuses it on the CPU as well"
EXCEPTIONS = {
    "empty": UNINITIALIZED,
    "empty_like": UNINITIALIZED,
    "empty_permuted": UNINITIALIZED,
    "empty_strided": UNINITIALIZED,
    "new_empty": UNINITIALIZED,
    "new_empty_strided": UNINITIALIZED,
    "jiterator_2inputs_2outputs": NEEDS_GPU,
    "jiterator_4inputs_with_extra_args": NEEDS_GPU,
    "jiterator_binary": NEEDS_GPU,
    "jiterator_binary_return_by_ref": NEEDS_GPU,
    "jiterator_unary": NEEDS_GPU,
}
"""Operators that are not held to eager's values, and why."""

DATA_DEPENDENT = "Dynamo does not capture an operator that returns a number which depends on data"
NO_META = "torch has no meta kernel that tells the size of the result, so Dynamo does not capture it"
RESIZED = "Dynamo does not capture a tensor that is resized in place"
SPARSE = "torch.compile does not take sparse tensors"
NOT_CAPTURED = {
    "allclose": DATA_DEPENDENT,
    "corrcoef": DATA_DEPENDENT,
    "cov": DATA_DEPENDENT,
    "equal": DATA_DEPENDENT,
    "linalg.lstsq": NO_META,
    "linalg.lstsq.grad_oriented": NO_META,
    "nn.functional.ctc_loss": NO_META,
    "nn.functional.gaussian_nll_loss": "Dynamo does not capture its check of a condition that depends on data",
    "resize_": RESIZED,
    "resize_as_": RESIZED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}
"""Operators that torch.compile leaves to eager PyTorch with any backend, and why.

Each ATen operator that they dispatch is taken through the pipeline by itself, as `kagent_core.run_op` does.
"""

REFUSED_IN_PLACE = {
    "float_power": "eager PyTorch refuses to write float64 results into float32",
    "polygamma": "AOTAutograd refuses it, whatever the backend",
}
"""Operators whose in-place variant cannot run or cannot be captured, and why."""

NOT_CAPTURED_IN_PLACE = (
    "as_strided",
    "as_strided.partial_views",
    "squeeze",
    "squeeze.multiple",
    "t",
    "transpose",
    "unsqueeze",
)
"""Operators whose in-place variant changes its argument's shape or strides: Dynamo does not capture that."""

GRADIENTS_LAID_OUT_OTHERWISE = {
    "ormqr": "AOTAutograd traces its gradient with other strides than eager's, whatever the backend",
}
"""Operators whose gradients have eager's values, but not its strides, and why."""


# -- the database


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def entries(chunk: int | None = None) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    found = [entry for entry in op_db if entry.supports_dtype(torch.float32, "cpu")]
    return found if chunk is None else found[chunk::CHUNKS]


def first_sample(entry: Any, requires_grad: bool = False) -> Any:
    random.seed(0)
    torch.manual_seed(0)
    return next(iter(entry.sample_inputs("cpu", torch.float32, requires_grad=requires_grad)))


def dense(value: Any) -> Any:
    """Replace sparse tensors by the tensors that they consist of."""

    def parts(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided:
            return leaf
        if leaf.layout is torch.sparse_coo:
            return str(leaf.layout), tuple(leaf.shape), leaf._indices(), leaf._values()
        return str(leaf.layout), tuple(leaf.shape), leaf.crow_indices(), leaf.col_indices(), leaf.values()

    return pytree.tree_map(parts, value)


def copied(sample: Any) -> Any:
    leaves = pytree.tree_leaves(sample)
    if all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return copy_arguments(sample)
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, sample)


@pytest.fixture(autouse=True)
def everything_is_captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Dynamo capture what it would leave to eager PyTorch by default: sizes and numbers that depend on data.

    The database wraps its random operators into a function that seeds the generator, which Dynamo does not enter;
    here the tests seed it themselves.
    """
    from torch.testing._internal import common_methods_invocations as database

    monkeypatch.setattr(database, "wrapper_set_seed", lambda operator, *args, **kwargs: operator(*args, **kwargs))
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.fixture(autouse=True)
def everything_is_generated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every graph a second time, with generated kernels wherever they can be."""
    with generated_everywhere() as names:
        yield
    if request.node.originalname != "test_how_many_equal_eager":
        assert names, "no graph ran twice"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs that reach kagent."""
    names: list[str] = []
    compile_graph = _Capture._compile

    def noted(capture: _Capture, graph_module: Any, name: str) -> Any:
        names.append(name)
        return compile_graph(capture, graph_module, name)

    monkeypatch.setattr(_Capture, "_compile", noted)
    return names


# -- running


class OperatorByOperator(TorchDispatchMode):
    """Takes each ATen operator that eager PyTorch dispatches through the pipeline."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_overload(session_for(load_config(OPTIONS)), func, args, kwargs or {})


Function = Callable[[Any, Any, Any], Any]
Run = Callable[[Function, Any], tuple[Any, torch.Tensor]]


def plain(entry: Any) -> Function:
    """The operator: its results go to the caller."""
    operator = entry.op
    return lambda first, args, kwargs: operator(first, *args, **kwargs)


def planned(entry: Any) -> Function:
    """The operator and copies of its results, so that the results themselves lie in planned memory."""
    operator = entry.op

    def function(first: Any, args: Any, kwargs: Any) -> Any:
        results = pytree.tree_leaves(operator(first, *args, **kwargs))
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in results]

    return function


def between_neighbours(entry: Any) -> Function:
    """The operator between pointwise neighbours, before and after, that change nothing and that it may fuse with."""
    operator = entry.op

    def twice_negated(leaf: Any) -> Any:
        fits = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided
        return leaf.neg().neg() if fits else leaf

    def function(first: Any, args: Any, kwargs: Any) -> Any:
        given = pytree.tree_map(twice_negated, (first, args, kwargs))
        return pytree.tree_map(twice_negated, operator(given[0], *given[1], **given[2]))

    return function


def in_place(entry: Any) -> Function:
    """The operator's in-place variant, which writes its first argument."""
    operator = entry.inplace_variant
    return lambda first, args, kwargs: operator(first, *args, **kwargs)


def seeded(function: Function, sample: tuple[Any, Any, Any]) -> tuple[Any, torch.Tensor]:
    """Call with a fixed seed; return the result and the generator's state afterwards."""
    torch.manual_seed(1)
    result = function(*sample)
    return result, torch.get_rng_state()


def seeded_with_gradients(
    name: str, process: Callable[[Any], Any], function: Function, sample: tuple[Any, Any, Any]
) -> tuple[Any, torch.Tensor]:
    """As `seeded`, with the gradients of all arguments, for random gradients of the results.

    `process` makes of the results what has a gradient: not the phase of an eigenvector, say.
    """
    result, state = seeded(function, sample)
    arguments, results = differentiable(sample), differentiable(process(result))
    given = [torch.randn_like(leaf) for leaf in results]
    found = torch.autograd.grad(results, arguments, given, allow_unused=True) if results else ()
    if name in GRADIENTS_LAID_OUT_OTHERWISE:
        found = tuple(None if gradient is None else gradient.contiguous() for gradient in found)
    return (result, found), state


def differentiable(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def through_kagent(function: Function) -> Function:
    return torch.compile(function, backend="kagent", options=OPTIONS)  # type: ignore[no-any-return]


def one_by_one(function: Function) -> Function:
    def run(*sample: Any) -> Any:
        with torch.no_grad(), OperatorByOperator():
            return function(*sample)

    return run


@dataclass
class Tally:
    """What became of some operators.

    Attributes
    ----------
    identical, close
        Equal bit by bit, and equal within the dtype's tolerance.
    excepted
        Among `EXCEPTIONS`, and as said there.
    wrong
        What differs, by operator.
    """

    identical: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)
    excepted: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    def check(self, tested: Sequence[Any]) -> None:
        told = "\n\n".join(f"{name}: {what}" for name, what in self.wrong.items())
        equal = len(self.identical) + len(self.close)
        print(f"{equal} of {len(tested)} equal eager ({len(self.identical)} bit by bit); listed: {self.excepted}")
        assert not self.wrong, f"{len(self.wrong)} of {len(tested)} differ from eager:\n{told}"
        names = {full_name(entry) for entry in tested}
        assert equal == len(names - EXCEPTIONS.keys())
        assert set(self.excepted) == names & EXCEPTIONS.keys()


def compare(
    tested: Sequence[Any],
    variant: Callable[[Any], Function],
    graphs: list[str],
    with_gradients: bool = False,
    not_captured: Collection[str] = NOT_CAPTURED,
) -> Tally:
    tally = Tally()
    for entry in tested:
        name = full_name(entry)
        torch._dynamo.reset()
        sample = first_sample(entry, with_gradients)
        run: Run = seeded
        if with_gradients:
            run = functools.partial(seeded_with_gradients, name, sample.output_process_fn_grad)
        arguments = (sample.input, sample.args, sample.kwargs)
        try:
            if EXCEPTIONS.get(name) == NEEDS_GPU:
                refused(entry, *arguments)
                tally.excepted.append(name)
            else:
                graphs.clear()
                captured = name not in not_captured
                compare_one(name, variant(entry), arguments, tally, run, captured)
                assert bool(graphs) == captured, f"{len(graphs)} graphs reached kagent"
        except Exception as error:  # noqa: BLE001 - told for each operator, when all have run
            tally.wrong[name] = f"{type(error).__name__}: {error}"
    return tally


def refused(entry: Any, first: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(AssertionError, match="only supported on CUDA"):
        entry.op(first, *args, **kwargs)


def compare_one(name: str, function: Function, sample: Any, tally: Tally, run: Run, captured: bool) -> None:
    eagers, ours = copied(sample), copied(sample)
    want, want_state = run(function, eagers)
    got, got_state = run(through_kagent(function) if captured else one_by_one(function), ours)
    assert_same(dense(ours), dense(eagers), "argument afterwards")
    assert torch.equal(got_state, want_state), "it draws other random numbers than eager"
    if name in EXCEPTIONS:
        assert geometry(got) == geometry(want)
        tally.excepted.append(name)
        return
    try:
        assert_same(dense(got), dense(want), "result")
    except AssertionError:
        assert_nearer(got, want, run, function, sample)
    (tally.identical if is_identical(got, want) else tally.close).append(name)


def assert_nearer(got: Any, want: Any, run: Run, function: Function, sample: Any) -> None:
    """Assert of results that are not eager's that their errors against float64 are like eager's."""

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    draw = torch.randn_like
    with pytest.MonkeyPatch.context() as patch:  # the same gradients, of the results' type
        patch.setattr(torch, "randn_like", lambda leaf: draw(leaf.float()).to(leaf.dtype))
        exact, _ = run(function, pytree.tree_map(widened, copied(sample)))
    assert_as_exact(got, want, exact, 2, "result")


def geometry(result: Any) -> list[Any]:
    return [(leaf.dtype, tuple(leaf.shape), leaf.stride()) for leaf in pytree.tree_leaves(result)]


def is_identical(got: Any, want: Any) -> bool:
    pairs = zip(pytree.tree_leaves(dense(got)), pytree.tree_leaves(dense(want)), strict=True)
    return all(
        bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in pairs
        if isinstance(other, torch.Tensor)
    )


# -- the tests


def test_how_many_equal_eager() -> None:
    names = [full_name(entry) for entry in entries()]
    assert len(names) == len(set(names)) == ENTRIES
    assert set(names) >= EXCEPTIONS.keys() | NOT_CAPTURED.keys()
    assert sum(len(entries(chunk)) for chunk in range(CHUNKS)) == ENTRIES  # the chunks below are all of them
    assert len(set(names) - EXCEPTIONS.keys()) == EQUAL


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_first_sample_of_every_operator(chunk: int, graphs: list[str]) -> None:
    tested = entries(chunk)
    compare(tested, plain, graphs).check(tested)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_results_in_planned_memory(chunk: int, graphs: list[str]) -> None:
    tested = [entry for entry in entries(chunk) if full_name(entry) not in NOT_CAPTURED]
    compare(tested, planned, graphs).check(tested)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_between_pointwise_neighbours(chunk: int, graphs: list[str]) -> None:
    tested = [entry for entry in entries(chunk) if full_name(entry) not in NOT_CAPTURED]
    compare(tested, between_neighbours, graphs).check(tested)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients(chunk: int, graphs: list[str]) -> None:
    left_out = NOT_CAPTURED.keys() | EXCEPTIONS.keys()
    tested = [e for e in entries(chunk) if e.supports_autograd and full_name(e) not in left_out]
    compare(tested, plain, graphs, with_gradients=True).check(tested)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_in_place_variants(chunk: int, graphs: list[str]) -> None:
    left_out = NOT_CAPTURED.keys() | REFUSED_IN_PLACE.keys()
    tested = [e for e in entries(chunk) if e.inplace_variant and not {e.name, full_name(e)} & left_out]
    tested = [e for e in tested if not first_sample(e).broadcasts_input]
    compare(tested, in_place, graphs, not_captured=NOT_CAPTURED_IN_PLACE).check(tested)
