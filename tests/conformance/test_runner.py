"""What comes of cases: every way to end, expected failures, the level that is reached, and the reports."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from kagent_core.errors import ConfigError
from kagent_core.specs import Device, DeviceInfo
from kagent_core.testing.conformance import (
    CannotRunError,
    Case,
    Counts,
    ExpectedFailure,
    ExpectedFailures,
    Finding,
    Outcome,
    Ran,
    Report,
    Target,
    read_expected,
    run_conformance,
)
from kagent_core.testing.conformance.expected import expected_of
from kagent_core.testing.conformance.report import SCHEMA
from kagent_core.testing.conformance.runner import run_case
from kagent_core.testing.fake import FakeDevice

from . import planted
from .kit import case_of, fake_run

TARGET = Target("fake:0")
LISTED = ExpectedFailures((ExpectedFailure("1/made*", "known since spring"),))
SCHEMA_TEXT = resources.files("kagent_core.testing.conformance").joinpath(f"report-{SCHEMA}.schema.json").read_text()


def passes(target: Target) -> Ran:
    return Ran(note="7 calls")


def falls_back(target: Target) -> Ran:
    return Ran((("aten::sin", "no kernel for aten::sin"),))


def fails(target: Target) -> Ran:
    raise AssertionError("3 is not 4")


def crashes(target: Target) -> Ran:
    raise KeyError("gone")


def cannot(target: Target) -> Ran:
    raise CannotRunError("no such library")


# -- what comes of a case


@pytest.mark.parametrize(
    ("run", "outcome", "detail"),
    [
        (passes, Outcome.PASSED, "7 calls"),
        (falls_back, Outcome.FALLBACK, "aten::sin: no kernel for aten::sin"),
        (fails, Outcome.FAILED, "3 is not 4"),
        (crashes, Outcome.FAILED, "KeyError: 'gone'"),
        (cannot, Outcome.COULD_NOT_RUN, "no such library"),
    ],
)
def test_an_outcome(run, outcome, detail):
    finding = run_case(case_of(run), TARGET, ExpectedFailures())
    assert (finding.outcome, finding.detail) == (outcome, detail)
    assert bool(finding.script) == (outcome is Outcome.FAILED)


@pytest.mark.parametrize(
    ("run", "outcome", "detail"),
    [
        (passes, Outcome.UNEXPECTED, "it passes, though it is listed as failing: known since spring"),
        (falls_back, Outcome.UNEXPECTED, "it passes, though it is listed as failing: known since spring"),
        (fails, Outcome.EXPECTED, "known since spring (3 is not 4)"),
        (crashes, Outcome.EXPECTED, "known since spring (KeyError: 'gone')"),
        (cannot, Outcome.COULD_NOT_RUN, "no such library"),
    ],
)
def test_an_outcome_of_a_listed_case(run, outcome, detail):
    finding = run_case(case_of(run), TARGET, LISTED)
    assert (finding.outcome, finding.detail) == (outcome, detail)
    assert run_case(case_of(run, "another"), TARGET, LISTED).outcome not in (Outcome.EXPECTED, Outcome.UNEXPECTED)


def test_a_user_who_gives_up_ends_the_run():
    def interrupted(target):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_case(case_of(interrupted), TARGET, ExpectedFailures())


def test_a_script_that_cannot_be_written_hides_no_failure():
    def script(target):
        raise OSError("no source")

    finding = run_case(replace(case_of(fails), script=script), TARGET, ExpectedFailures())
    assert finding.detail == "3 is not 4"
    assert finding.script == "# no script could be written for 1/made up: OSError: no source\n"


def test_progress_is_told():
    cases, began, found = [], [], []
    with_progress = {"on_start": cases.extend, "doing": began.append, "on_finding": found.append}
    report = fake_run(FakeDevice(), "0/its*", **with_progress)
    assert len(cases) == 3
    assert [case.key for case in cases] == [case.key for case in began] == [finding.case.key for finding in found]
    assert tuple(found) == report.findings


# -- the level


def report_of(*outcomes: tuple[int, Outcome], levels=None, only=None) -> Report:
    findings = tuple(
        Finding(case_of(passes, f"case {position}", level, "a family"), outcome, f"<why> {position}", 0.25,
                "print('it')\n" if outcome in (Outcome.FAILED, Outcome.EXPECTED) else "")
        for position, (level, outcome) in enumerate(outcomes)
    )  # fmt: skip
    info = DeviceInfo(Device("toy", 0), "Toy <3000>", emulated=True, plugin="kagent-toy")
    levels = levels or tuple(sorted({level for level, _ in outcomes}))
    versions = {"kagent": "1", "torch": "2", "python": "3", "platform": "here"}
    return Report(Target("toy:0"), info, levels, only, findings, "2030-01-02T03:04:05+00:00", 1.5, versions)


P, F, B, E, U, C = (
    Outcome.PASSED,
    Outcome.FAILED,
    Outcome.FALLBACK,
    Outcome.EXPECTED,
    Outcome.UNEXPECTED,
    Outcome.COULD_NOT_RUN,
)


@pytest.mark.parametrize(
    ("outcomes", "level", "badge", "passed"),
    [
        ([(0, P)], 0, "level 0, 0 wrong", True),
        ([(0, P), (1, B), (1, C)], 1, "level 1, 0 wrong", True),
        ([(0, P), (1, F), (2, P)], 0, "level 0, 1/1 native, 1 wrong", False),
        ([(0, F)], None, "no level, 1 wrong", False),
        ([(0, C)], None, "no level, 0 wrong", True),
        ([(0, P), (1, P), (2, P), (2, B), (2, C), (3, P)], 3, "level 3, 1/2 native, 0 wrong", True),
        ([(0, P), (1, E)], 0, "level 0, 0 wrong, 1 expected to fail", True),
        ([(0, P), (1, U)], 0, "level 0, 0 wrong, 1 listed as failing but right", False),
        ([(1, P), (2, P)], None, "levels 1, 2 alone, 1/1 native, 0 wrong", True),
        ([(0, P), (2, P)], 0, "level 0, 1/1 native, 0 wrong", True),
    ],
)
def test_the_badge(outcomes, level, badge, passed):
    report = report_of(*outcomes)
    assert (report.level, report.badge(), report.passed) == (level, badge, passed)


def test_a_part_reaches_no_level():
    report = report_of((0, P), (0, P), only="0/case*")
    assert (report.level, report.badge()) == (None, "2 cases of a part, 0 wrong")


def test_counts():
    counts = report_of((0, P), (0, P), (0, B), (0, F), (0, E), (0, U), (0, C)).counts(0)
    assert counts == Counts(7, native=2, fallback=1, failed=1, expected=1, unexpected=1, could_not_run=1)
    assert counts.right == 3


# -- reports


EVERYTHING = [(0, P), (0, F), (1, E), (1, U), (2, B), (2, C)]


def test_the_json_is_as_its_schema_says():
    report = report_of(*EVERYTHING)
    read = json.loads(report.to_json())
    jsonschema.validate(read, json.loads(SCHEMA_TEXT))
    assert read["levels"][1] == {
        "level": 1, "title": "packing and layouts", "cases": 2, "native": 0, "fallback": 0, "failed": 0,
        "expected": 1, "unexpected": 1, "could_not_run": 0,
    }  # fmt: skip
    assert [finding["outcome"] for finding in read["findings"]] == [
        "native", "failed", "expected", "unexpected", "fallback", "could_not_run",
    ]  # fmt: skip
    assert read["findings"][1]["script"] == "print('it')\n"


def test_the_schema_would_notice():
    read = report_of(*EVERYTHING).as_dict()
    for wrong in ({"schema": 2}, {"level": 9}, {"more": 1}, {"findings": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(read | wrong, json.loads(SCHEMA_TEXT))


def test_a_real_report_is_as_the_schema_says():
    jsonschema.validate(fake_run(FakeDevice(), "0/its*").as_dict(), json.loads(SCHEMA_TEXT))


class Page(HTMLParser):
    """Collects a page's text, and whatever it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_by_itself():
    report = report_of(*EVERYTHING)
    page = Page(report.to_html())
    text = " ".join(" ".join(page.text).split())
    assert page.loads == []
    assert page.open == []
    assert report.badge() in text
    assert "Toy <3000> , emulated, from kagent-toy" in text.replace("Toy <3000>,", "Toy <3000> ,")
    for position in (1, 2, 3, 4, 5):
        assert f"<why> {position}" in text
    assert text.count("print('it')") == 2
    assert "1/case 2: expected failure" in text.replace("1/case 2 :", "1/case 2:")
    for level in ("0 contract", "1 packing and layouts", "2 operators"):
        assert level in text


def test_a_page_without_failures_says_so():
    text = " ".join(Page(report_of((0, P)).to_html()).text)
    assert text.count("None.") == 3


def test_scripts_are_written(tmp_path):
    report = report_of((0, F), (0, P), (1, E))
    same_name = replace(report.findings[0], case=case_of(fails, "case:0", 0))
    report = replace(report, findings=(*report.findings, same_name))
    written = report.write_scripts(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["0-case-0.py", "1-case-2.py", "0-case-0-2.py"]
    assert all(path.read_text() == "print('it')\n" for path in written)


# -- the list of expected failures


def listed(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "conformance.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_list_is_read(tmp_path):
    text = '[[expected]]\ncase = "2/linalg.svd*"\nreason = "no svd"\n[[expected]]\ncase = "*/other"\nreason = "x"\n'
    found = read_expected(listed(tmp_path, text))
    assert found.reason_for("2/linalg.svd.float64") == "no svd"
    assert found.reason_for("4/other") == "x"
    assert found.reason_for("2/linalg.qr") is None


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[expected", "is no TOML", None),
        ("[[expect]]\ncase = '1/x'", "has the key 'expect'", "[[expected]]"),
        ("expected = 3", "expected entries", None),
        ("expected = [3]", "entry 1 of .* is 3", None),
        (
            "[[expected]]\ncase = '1/x'\nreason = 'y'\n[[expected]]\ncsae = '1/x'",
            "entry 2 .* has the key 'csae'",
            "'case'",
        ),
        ("[[expected]]\ncase = '1/x'\nreasn = 'y'", "entry 1 .* has the key 'reasn'", "did you mean 'reason'"),
        ("[[expected]]\ncase = '1/x'", "entry 1 .* must have a text as 'reason', and has none", None),
        ("[[expected]]\ncase = '1/x'\nreason = ' '", "must have a text as 'reason', and has ' '", None),
        ("[[expected]]\ncase = 3\nreason = 'y'", "must have a text as 'case', and has 3", None),
        ("[[expected]]\ncase = 'svd'\nreason = 'y'", "begins with no level", "LEVEL/NAME"),
    ],
)
def test_a_list_with_a_mistake(tmp_path, text, message, hint):
    path = listed(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_expected(path)
    assert str(path) in caught.value.message
    if hint is not None:
        assert hint in caught.value.hint


def test_a_list_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_expected(tmp_path / "nothing.toml")


def test_an_entry_about_no_case_names_the_nearest(tmp_path):
    path = listed(tmp_path, "[[expected]]\ncase = '0/its info is insane'\nreason = 'y'")
    with pytest.raises(
        ConfigError, match=r"entry 1 .* is about case '0/its info is insane', which there is not"
    ) as caught:
        fake_run(FakeDevice(), "0/its*", expected=path)
    assert caught.value.hint == "did you mean '0/its info is sane'?"


def test_an_entry_about_a_level_that_is_not_run_is_left_alone(tmp_path):
    path = listed(tmp_path, "[[expected]]\ncase = '1/nothing'\nreason = 'y'")
    assert fake_run(FakeDevice(), "0/its info*", expected=path).passed


def test_an_entry_about_a_case_of_the_full_size_is_right(tmp_path):
    path = listed(tmp_path, "[[expected]]\ncase = '0/launches run in order: launches=1000'\nreason = 'y'")
    assert fake_run(FakeDevice(), "0/its info*", expected=path).passed


def test_an_expected_failure_that_passes_is_told(tmp_path):
    path = listed(tmp_path, "[[expected]]\ncase = '0/its info is sane'\nreason = 'y'")
    report = fake_run(FakeDevice(), "0/its*", expected=path)
    assert not report.passed
    assert [finding.case.key for finding in report.failures] == ["0/its info is sane"]


def test_the_plugins_own_list_is_found():
    assert expected_of("cpu").path.name == "conformance.toml"
    assert expected_of("cpu").path.parent.name == "kagent_cpu"


def test_an_expected_failure_is_one(tmp_path):
    path = listed(tmp_path, "[[expected]]\ncase = '0/bytes at an offset*'\nreason = 'y'")
    broken = FakeDevice(runtime=planted.CopyOutIgnoresOffset())
    report = fake_run(broken, "0/bytes at an offset: at=3, nbytes=64", expected=path)
    assert [finding.outcome for finding in report.findings] == [Outcome.EXPECTED]


def test_every_entry_of_our_own_lists_is_about_a_case():
    for device in ("cpu", "fake"):
        levels = sorted({int(entry.case[0]) for entry in run_with_list(device).entries})
        run_conformance(device, [*levels, 0], only="0/its info is sane")  # checks the list against the cases


def run_with_list(device: str) -> ExpectedFailures:
    from kagent_core.testing.conformance.opened import registered

    with registered(device):
        return expected_of(device)


def test_the_case_is_what_a_list_names():
    assert Case(2, "add.float32", "pointwise", passes, str).key == "2/add.float32"
