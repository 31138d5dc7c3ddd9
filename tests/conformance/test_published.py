"""The docs' table of our own devices is made from the reports that lie beside the docs."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kagent_core.testing.conformance import Outcome

from .test_runner import report_of

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> str:
    """Build a page with nothing but the table, and return its text."""
    shutil.copy(ROOT / "docs" / "conf.py", folder)
    (folder / "index.md").write_text("# Results\n\n```{conformance-results}\n```\n", encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", folder, folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (folder / "out" / "index.html").read_text(encoding="utf-8")
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_without_a_report_the_page_says_so(tmp_path):
    assert "Not run for these pages: make conformance-full writes the results." in build(tmp_path)


@pytest.mark.parametrize("pipe", ["", "|"])
def test_a_report_is_a_row(tmp_path, pipe):
    report = report_of((0, Outcome.PASSED), (1, Outcome.FALLBACK), (2, Outcome.FAILED), (2, Outcome.COULD_NOT_RUN))
    (tmp_path / "conformance").mkdir()
    text = report.to_json().replace("Toy <3000>", f"Toy {pipe}3000")
    (tmp_path / "conformance" / "toy.json").write_text(text, encoding="utf-8")
    page = build(tmp_path)
    for told in ("toy:0", "3000", "emulated", "level 1", "1 wrong", "2030-01-02", "kagent 1"):
        assert told in page
    assert "Not run" not in page
