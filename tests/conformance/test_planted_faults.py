"""A kit that cannot fail is worth nothing: each planted fault is found by the case that is there for it."""

from __future__ import annotations

import re

import pytest

from kagent_core.testing.conformance import Outcome
from kagent_core.testing.fake import FakeDevice, FakeRuntime

from . import planted
from .kit import fake_run

RUNTIMES = [
    (planted.CopyOutIgnoresOffset, "0/bytes at an offset: at=3, nbytes=64"),
    (planted.CopyInIgnoresOffset, "0/bytes at an offset: at=1000, nbytes=5"),
    (planted.CopiesWholeWords, "0/bytes at an offset: at=3, nbytes=5"),
    (planted.DropsTheLastByte, "0/bytes come back: nbytes=7"),
    (planted.FailsOnNothing, "0/bytes come back: nbytes=0"),
    (planted.ReadsHostMemoryLate, "0/host bytes may be reused*"),
    (planted.FreesTwice, "0/live buffers do not overlap"),
    (planted.AllocationsOverlap, "0/live buffers do not overlap"),
    (planted.GivesNoneForTooMuch, "0/too much memory is refused"),
    (planted.GivesLessForTooMuch, "0/too much memory is refused"),
    (planted.DiesOfTooMuch, "0/too much memory is refused"),
    (planted.ImportsACopy, "0/host memory in place: nbytes=64"),
    (planted.FreesTheHostsMemory, "0/host memory in place: nbytes=4099"),
    (planted.ClosesForGood, "0/closed and opened again"),
    (planted.LoadsAnything, "0/a kernel that is none is refused: source that does not compile"),
    (planted.OneLaunchBehind, "0/launches run in order*"),
    (planted.OneSlotForScalars, "0/launches run in order*"),
    (planted.OneSlotForScalars, "1/scalars of many launches"),
    (planted.SkipsTheLastLaunch, "0/recorded launches compute what single ones do"),
    (planted.StartsOnce, "0/recorded launches compute what single ones do"),
    (planted.StartsInAnyOrder, "0/recorded launches compute what single ones do"),
    (planted.KeepsStaleArguments, "0/a recording takes other arguments"),
    (planted.UpdatesTheNextLaunch, "0/a recording takes other arguments"),
    (planted.SkipsTheLastLaunch, "0/a recording takes other arguments"),
    (planted.WritesBehindResults, "1/nothing is written behind a buffer"),
    (planted.Leaks, "5/memory that is freed can be used again"),
    (planted.SealsAndLeaks, "5/plans that come and go"),
    (planted.SealsAndLeaks, "5/threads with programs of their own"),
    (planted.SealsAndExplainsNothing, "5/a fault of: launch"),
    (planted.GrowsWithEveryLaunch, "5/one plan many calls"),
]

PACKERS = [
    (planted.wraps_integers, "1/a scalar that is computed with: int64"),
    (planted.rounds_to_float32, "1/a scalar that is computed with: float64"),
    (planted.loses_the_sign_of_zero, "1/a scalar that is computed with: float32"),
    (planted.Remembering, "1/scalars that change between calls"),
    (planted.takes_all_for_contiguous, "1/a tensor: transposed, everything, float32"),
    (planted.takes_all_for_contiguous, "1/products of views"),
    (planted.ignores_offsets, "1/a tensor: contiguous, everything, float32"),
    (planted.takes_all_for_contiguous, "1/a tensor written in place: columns of a wider one, add_*"),
]


def only_finding(report):
    [*findings] = report.findings
    assert findings
    return findings


def caught(device: FakeDevice, case: str) -> str:
    report = fake_run(device, case)
    failed = [finding for finding in only_finding(report) if finding.outcome is Outcome.FAILED]
    assert failed, [(finding.case.key, finding.outcome, finding.detail) for finding in report.findings]
    assert not report.passed
    return failed[0].detail


@pytest.mark.parametrize(("runtime", "case"), RUNTIMES, ids=lambda given: getattr(given, "__name__", given))
def test_a_broken_runtime_is_found_out(runtime, case):
    assert caught(FakeDevice(runtime=runtime()), case)


@pytest.mark.parametrize("case", dict.fromkeys(case for _, case in RUNTIMES))
def test_a_sound_runtime_passes_the_same_case(case):
    report = fake_run(FakeDevice(runtime=FakeRuntime()), case)
    assert report.passed, [finding.detail for finding in report.failures]
    assert any(finding.outcome in (Outcome.PASSED, Outcome.FALLBACK) for finding in report.findings)


@pytest.mark.parametrize(
    ("runtime", "case"),
    [
        (planted.WaitsByCopying, "5/plans that come and go"),
        (planted.WaitsByCopying, "5/a fault of: allocate"),
        (planted.ImportsInPlace, "0/host memory in place*"),
        (planted.ImportsInPlace, "5/plans that come and go"),
        (planted.Records, "0/*record*"),
        (planted.RefusesOtherArguments, "0/*record*"),
    ],
)
def test_what_a_runtime_may_do_is_no_failure(runtime, case):
    report = fake_run(FakeDevice(runtime=runtime()), case)
    assert report.passed, [finding.detail for finding in report.failures]


def test_what_was_recorded_is_told():
    report = fake_run(FakeDevice(runtime=planted.Records()), "0/*record*")
    assert all(re.fullmatch(r"[2-9] launches", finding.detail) for finding in report.findings)
    report = fake_run(FakeDevice(), "0/*record*")
    assert [finding.detail for finding in report.findings] == ["not offered"] * 2


@pytest.mark.parametrize(("change", "case"), PACKERS, ids=lambda given: getattr(given, "__name__", given))
def test_a_broken_packer_is_found_out(change, case):
    assert caught(planted.BadlyPacked(change), case)


@pytest.mark.parametrize("case", dict.fromkeys(case for _, case in PACKERS))
def test_a_sound_packer_passes_the_same_case(case):
    report = fake_run(planted.BadlyPacked(lambda value: value), case)
    assert report.passed, [finding.detail for finding in report.failures]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_parameters": 0}, "max_parameters is 0"),
        ({"max_threads_per_block": -1}, "max_threads_per_block is -1"),
        ({"memory_nbytes": -5}, "memory_nbytes is -5"),
        ({"shared_nbytes": -1}, "shared_nbytes is -1"),
        ({"name": " "}, "its name is empty"),
        ({"max_grid": (1, 0, 1)}, "max_grid is"),
        ({"details": (("driver", 3),)}, "expected texts"),
    ],
)
def test_what_a_device_tells_of_itself_is_looked_at(changes, told):
    assert told in caught(planted.BadlyDescribed(**changes), "0/its info is sane")


def test_a_probe_that_changes_its_mind():
    assert "again gave" in caught(planted.NeverTheSame(), "0/its probe tells the same each time")


def test_the_message_says_what_differs():
    told = caught(FakeDevice(runtime=planted.CopyOutIgnoresOffset()), "0/bytes at an offset: at=3, nbytes=64")
    assert "copy_out of 64 bytes at 3" in told
    assert "of 64 bytes differ, the first at 0" in told
