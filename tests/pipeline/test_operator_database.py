"""Every operator in torch's own operator database equals eager PyTorch, but for those that are listed here.

The database's first float32 sample of each operator runs in eager PyTorch and through ``backend="kagent"``. Values,
dtypes, shapes, strides, the arguments afterwards and the state of the random number generator are compared. Every graph
runs a second time with generated kernels wherever they can be (`forced`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from kagent_core.backend import _Capture
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance.database import (
    EXCEPTIONS,
    NEEDS_GPU,
    NOT_CAPTURED,
    copied,
    database_entries,
    dense,
    everything_captured,
    full_name,
    samples,
)
from kagent_core.testing.conformance.operators import Function, geometry, plain, seeded, seeded_with_gradients
from kagent_core.testing.conformance.running import OperatorByOperator, assert_right, widened

from .forced import generated_everywhere
from .models import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch deprecates is in its database as well

CHUNKS = 16
HALF_OF_THE_CHUNKS = [pytest.param(n, marks=pytest.mark.nightly if n % 2 else ()) for n in range(CHUNKS)]
"""All of them in the nightly run."""

ENTRIES = 677
"""Entries of the database that support float32 on the CPU, in torch 2.13."""
EQUAL = 666
"""How many of them equal eager."""

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

# -- the database


def entries(chunk: int | None = None) -> list[Any]:
    found = database_entries(torch.float32)
    return found if chunk is None else found[chunk::CHUNKS]


def first_sample(entry: Any, requires_grad: bool = False) -> Any:
    return samples(entry, torch.float32, requires_grad=requires_grad)[0]


@pytest.fixture(autouse=True)
def everything_is_captured() -> Iterator[None]:
    with everything_captured():
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

    def noted(capture: _Capture, graph_module: Any, name: str, parameters: Any) -> Any:
        names.append(name)
        return compile_graph(capture, graph_module, name, parameters)

    monkeypatch.setattr(_Capture, "_compile", noted)
    return names


# -- running


Run = Callable[[Function, Any], tuple[Any, torch.Tensor]]


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


def through_kagent(function: Function) -> Function:
    return torch.compile(function, backend="kagent", options=OPTIONS)  # type: ignore[no-any-return]


def one_by_one(function: Function) -> Function:
    def run(*sample: Any) -> Any:
        with torch.no_grad(), OperatorByOperator(session_for(load_config(OPTIONS))):
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
    assert_right(got, want, "result", lambda: run(function, widened(copied(sample)))[0])
    (tally.identical if is_identical(got, want) else tally.close).append(name)


def is_identical(got: Any, want: Any) -> bool:
    pairs = zip(pytree.tree_leaves(dense(got)), pytree.tree_leaves(dense(want)), strict=True)
    return all(
        bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in pairs
        if isinstance(other, torch.Tensor)
    )


# -- the tests


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="other versions of PyTorch have other operators in their database",
)
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
@pytest.mark.parametrize("chunk", HALF_OF_THE_CHUNKS)
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
@pytest.mark.parametrize("chunk", HALF_OF_THE_CHUNKS)
def test_in_place_variants(chunk: int, graphs: list[str]) -> None:
    left_out = NOT_CAPTURED.keys() | REFUSED_IN_PLACE.keys()
    tested = [e for e in entries(chunk) if e.inplace_variant and not {e.name, full_name(e)} & left_out]
    tested = [e for e in tested if not first_sample(e).broadcasts_input]
    compare(tested, in_place, graphs, not_captured=NOT_CAPTURED_IN_PLACE).check(tested)
