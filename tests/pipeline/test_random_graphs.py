"""Random programs over views, broadcasting, reductions, mutation and mixed dtypes: kagent gives what eager gives.

``RANDOM_GRAPHS`` sets how many are tried on each device, other ones each time; by default 60, always the same ones.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core.testing import FakeDevice, FakeRuntime
from kagent_core.testing.compare import assert_same, copy_arguments
from kagent_core.testing.conformance.programs import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    STEPS,
    make_input,
    run_program,
    valid_steps,
)

from .forced import generated_everywhere

EXAMPLES = int(os.environ.get("RANDOM_GRAPHS", "60"))
ALWAYS_THE_SAME = "RANDOM_GRAPHS" not in os.environ
shapes, dtypes, layouts = st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)
steps = st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
inputs = st.lists(st.builds(make_input, shapes, dtypes, layouts, st.integers(0, 9)), min_size=2, max_size=3)


def check(arguments, program, device):
    program = valid_steps(arguments, program)
    note(f"valid steps: {program}")

    def function(*given):
        return run_program(program, given)[len(given) :]

    torch._dynamo.reset()
    compiled = kagent_core.compile(function, device=device, logs="error")
    types = {tensor.dtype for tensor in run_program(program, copy_arguments(arguments))}
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
