"""``python -m kagent_cuda.check``: what can be tried without a GPU, and that it finds what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core.kernels import override
from kagent_cuda.check import benchmarks, correctness, devices, sanitizer
from kagent_cuda.check.__main__ import SECTIONS, TOTAL_S
from kagent_cuda.check.devices import find_device
from kagent_cuda.check.models import models
from kagent_cuda.check.operators import groups
from kagent_cuda.check.report import summary, table
from kagent_cuda.check.sections import Outcome, Row, Section, Tell, run_section
from kagent_cuda.check.setting import Setting


@pytest.mark.slow
def test_the_whole_command_on_the_emulated_device(tmp_path: Path) -> None:
    written = tmp_path / "check.json"
    command = [sys.executable, "-m", "kagent_cuda.check", "--device", "emulated", "--tiny", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(written.read_text(encoding="utf-8"))
    assert told["device"]["emulated"]
    assert [section["name"] for section in told["sections"]] == ["device", *(section.name for section in SECTIONS)]
    for section in told["sections"]:
        assert section["state"] == "done", section
        assert section["rows"], section
        assert f"── {section['name']} " in done.stdout
    rows = {row["name"]: row for section in told["sections"] for row in section["rows"]}
    assert rows["pointwise, float32"]["figures"]["fallbacks"] == 0
    assert rows["GPT-2-like, float32"]["failed"] is None
    assert rows["ResNet-like float32"]["figures"]["kagent µs"] > 0


def test_without_a_device_it_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kagent_cuda.check", "--device", "cuda:77", "--json", str(tmp_path / "check.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "there is no device 'cuda:77'" in done.stdout


def test_all_sections_have_time() -> None:
    assert sum(section.budget_s for section in SECTIONS[:-1]) <= TOTAL_S < 360


@pytest.fixture
def setting(cache_dir: Path) -> Setting:
    """Return that of the emulated device."""
    setting, facts, outcome = find_device(Setting("cuda", cache_dir, tiny=True), "emulated")
    assert not outcome.wrong, table([outcome])
    assert "emulated" in facts["name"]
    return setting


def test_whether_tensors_of_the_device_are_taken_is_tried_apart(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome("device")
    tried = devices._with_torch(Setting("cpu", cache_dir), outcome)  # where they are
    assert (tried.torch_cuda, tried.cuda_tensors, outcome.rows[-1].met) == (True, True, True)

    def crashes(setting: Setting, tell: Tell) -> None:
        tell(Row("PyTorch"))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(devices, "_tell_in_place", crashes)
    outcome = Outcome("device")
    tried = devices._with_torch(Setting("cpu", cache_dir), outcome)
    assert (tried.torch_cuda, tried.cuda_tensors, outcome.rows[-1].met) == (True, False, False)
    assert "SIGKILL" in outcome.note
    assert not outcome.wrong  # what is compared and measured on host tensors still counts


# -- sections


def _tells(setting: Setting, tell: Tell) -> None:
    tell(Row("one", {"number": 1}))


def _raises(setting: Setting, tell: Tell) -> None:
    tell(Row("before"))
    raise ValueError("no luck\nat all")


def _crashes(setting: Setting, tell: Tell) -> None:
    tell(Row("before"))
    os.write(2, b"what the driver said\n")
    os.kill(os.getpid(), signal.SIGKILL)  # no pytest speaks of this one


def _hangs(setting: Setting, tell: Tell) -> None:
    tell(Row("before"))
    subprocess.run(["sleep", "60"], check=False)


def _run(run: Callable[[Setting, Tell], None], budget_s: float = 60) -> Outcome:
    return run_section(Section("planted", budget_s, run), Setting("cuda:0", Path()), budget_s)


def test_a_section_tells_its_rows() -> None:
    outcome = _run(_tells)
    assert (outcome.state, outcome.rows, outcome.wrong) == ("done", [Row("one", {"number": 1})], False)


def test_a_section_that_raises_is_told() -> None:
    outcome = _run(_raises)
    assert (outcome.state, outcome.note) == ("failed", "raised ValueError: no luck")
    assert outcome.rows == [Row("before")]
    assert outcome.wrong


def test_a_section_that_crashes_is_told() -> None:
    outcome = _run(_crashes)
    assert outcome.state == "failed"
    assert "SIGKILL" in outcome.note
    assert "what the driver said" in outcome.note
    assert outcome.rows == [Row("before")]


def test_a_section_that_takes_too_long_is_cut() -> None:
    started = time.monotonic()
    outcome = _run(_hangs, budget_s=1)
    assert time.monotonic() - started < 30  # and not a minute
    assert (outcome.state, outcome.rows, outcome.wrong) == ("cut", [Row("before")], False)
    assert "cut after 1 s, with 1 rows told" in outcome.note


def test_the_table_says_what_is_wrong_and_what_was_aimed_at() -> None:
    rows = [Row("good", {"x": 1}, aim="x is 1", met=True), Row("slow", {"x": 2}, aim="x is 1", met=False)]
    outcomes = [Outcome("first", rows), Outcome("second", [Row("bad", failed="3 is not 4")], "cut", "cut after 1 s")]
    told = table(outcomes)
    assert "[aim: x is 1: met]" in told
    assert "[aim: x is 1: NOT MET]" in told
    assert "WRONG: 3 is not 4" in told
    assert "cut after 1 s" in told
    assert summary(outcomes, 5) == "2 sections in 5 s: 1 wrong, 1 not finished; 1 of 2 aims met"


# -- what is compared

WRONG_RELU = """
extern "C" __global__ void wrong(const float *self, float *out, long long numel) {
    for (long long i = threadIdx.x; i < numel; i += blockDim.x) out[i] = self[i] > 0.5f ? self[i] : 0;
}
"""


def test_a_wrong_operator_is_found(setting: Setting) -> None:
    [group] = [group for group in groups(False) if group.name == "pointwise"]
    small = type(group)(group.name, group.dtypes, groups(True)[0].inputs, {"relu": group.program["relu"]})
    with override("aten::relu", device=setting.device, source=WRONG_RELU):
        row = correctness._check_group(setting, small, torch.float32)
    assert row.failed is not None
    assert row.failed.startswith("relu: ")
    assert row.figures["right"] == 0
    assert correctness._check_group(setting, small, torch.float32).failed is None


def test_an_operator_that_fails_is_named_and_the_others_go_on(setting: Setting) -> None:
    def raises(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("planted")

    group = groups(True)[0]
    program = {"neg": lambda x, y: -x, "raises": raises}
    row = correctness._check_group(setting, type(group)("few", group.dtypes, group.inputs, program), torch.float32)
    assert row.failed is not None
    assert "raises: " in row.failed
    assert "neg" not in row.failed
    assert row.figures["right"] == 1


def test_a_hand_written_kernel_without_a_barrier_is_found(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "    __syncthreads();\n    value = partial[0];"
    assert first in sanitizer.SOFTMAX
    broken = sanitizer.SOFTMAX.replace(first, "    value = partial[0];")
    monkeypatch.setitem(sanitizer.HAND_WRITTEN, "source", broken)
    monkeypatch.setattr(sanitizer, "cases", lambda tiny: sanitizer_cases(tiny)[:1])
    [(name, wrong)] = sanitizer.run_kernels(setting)
    assert name == "hand-written softmax"
    assert wrong is not None
    assert "no barrier" in wrong


sanitizer_cases = sanitizer.cases


def test_the_sanitizer_is_started_on_the_kernels_alone(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "Invalid __global__ read"\nexit 86\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rows: list[Row] = []
    sanitizer.check_sanitized(Setting("cuda:3", tmp_path), rows.append)
    assert [row.name.split()[-1] for row in rows] == list(sanitizer.TOOLS)
    assert all("Invalid __global__ read" in (row.failed or "") for row in rows)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all("--kernels-only --device cuda:3" in call for call in calls)


# -- what is measured


class OnTheHost(Setting):
    """As if PyTorch had the device that it is measured against."""

    has_peers = True  # type: ignore[assignment]

    def compile_peer(self, function: Any, mode: str) -> Any:
        """Return the function itself: compiling is not what is tried here."""
        return function


def test_peers_are_measured_next_to_kagent(cache_dir: Path) -> None:
    rows: list[Row] = []
    on_host = OnTheHost("cpu", cache_dir, tiny=True)
    for measure in (benchmarks.measure_fused, benchmarks.measure_fused_peers, benchmarks.measure_overhead):
        measure(on_host, rows.append)
    benchmarks.measure_autotuned(on_host, rows.append)
    named = {row.name: row for row in rows}
    softmax = named["softmax 2 × 40 float32"]
    assert softmax.figures["GB/s"] > 0
    assert softmax.met == (softmax.figures["of copy"] >= benchmarks.BANDWIDTH_AIM)
    assert {"softmax 2 × 40 float32, eager", "softmax 2 × 40 bfloat16, max-autotune"} <= set(named)
    model = named["ResNet-like float32"]
    assert {"kagent µs", "max-autotune µs", "times as fast"} <= set(model.figures)
    assert model.met == (model.figures["max-autotune µs"] >= model.figures["kagent µs"])


def test_the_full_sizes_are_those_of_the_models() -> None:
    counts = {}
    with torch.device("meta"):
        for model in models(False):
            module = model.make()
            counts[model.name] = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    assert counts["MiniLM-like"] == pytest.approx(22.6, abs=0.2)
    assert counts["ResNet-18"] == pytest.approx(11.69, abs=0.01)
    assert counts["GPT-2-like"] == pytest.approx(124.4, abs=0.1)
