"""The docs tell of everything that there is to use, and the pages build without a warning."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import kagent_core
from kagent_core import errors, hookspecs
from kagent_core.cli import app
from kagent_core.config import LOG_COMPONENTS, LOG_LEVELS, Config
from kagent_core.errors import KagentError
from kagent_core.extract.agent import STAGES
from kagent_core.inspect.dump import SCHEMA_FILE
from kagent_core.listing import PluginState

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text(encoding="utf-8")

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("kagent_")}
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KagentError) and kind is not KagentError
}
COMMANDS = getattr(typer.main.get_command(app), "commands", {})


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_listed_with_its_signature(name: str) -> None:
    parameters = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"`{name}({parameters})`" in PAGES["plugins"]


@pytest.mark.parametrize("name", kagent_core.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"^\.\. \w+:: kagent_core\.{name}(\(.*\))?$", PAGES["reference"], re.MULTILINE)


@pytest.mark.parametrize("key", Config.model_fields)
def test_every_config_key_is_explained(key: str) -> None:
    assert f"`{key}`" in re.sub(r"```.*?```", "", PAGES["configuration"], flags=re.DOTALL)


def test_the_table_of_config_keys_is_made_from_the_class() -> None:
    assert "```{config-keys}\n```" in PAGES["configuration"]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_a_section_and_its_base_in_the_table(name: str) -> None:
    assert f"\n### {name}\n" in PAGES["errors"]
    row = re.search(rf"^\| `{name}` \| `(\w+)`", PAGES["errors"], re.MULTILINE)
    assert row is not None
    assert row[1] in {kind.__name__ for kind in ERRORS[name].__mro__}


def test_there_are_commands() -> None:
    assert {"devices", "plugins", "config", "run", "demo", "bench"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed(name: str) -> None:
    assert f"| `kagent {name}` |" in PAGES["getting-started"]


@pytest.mark.parametrize("word", [*LOG_COMPONENTS, *LOG_LEVELS])
def test_every_log_component_and_level_is_explained(word: str) -> None:
    assert re.search(rf"^\| .*`{word}`.* \|", PAGES["logs-and-dumps"], re.MULTILINE)


@pytest.mark.parametrize("field", json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"])
def test_every_field_of_a_dump_is_explained(field: str) -> None:
    assert re.search(rf"^\| .*`{field}`.* \|", PAGES["logs-and-dumps"], re.MULTILINE)


@pytest.mark.parametrize("state", PluginState)
def test_every_state_of_a_plugin_is_explained(state: PluginState) -> None:
    assert f"| {state.value} |" in PAGES["plugins"]


def test_the_stages_are_told_in_order() -> None:
    places = [PAGES["architecture"].index(f"`{hook}`") for hook, _ in STAGES]
    assert places == sorted(places)


def test_every_part_of_the_core_is_in_the_layout() -> None:
    layout = PAGES["architecture"].partition("## Where things are")[2]
    parts = {
        path.name + ("/" if path.is_dir() else "")
        for path in (ROOT / "kagent_core").iterdir()
        if not path.name.startswith(("_", "py."))
    }
    assert {part for part in parts if f"`{part}`" not in layout} == set()


def test_every_page_is_in_the_contents() -> None:
    [contents] = re.findall(r"```\{toctree\}.*?\n\n(.*?)```", PAGES["index"], re.DOTALL)
    assert set(contents.split()) == set(PAGES) - {"index"}


def test_the_readme_begins_with_the_purpose_and_the_two_commands() -> None:
    title, purpose, *_ = README.split("\n\n")
    assert title == "# kagent"
    assert len(re.findall(r"[.!?](?:\s|$)", purpose)) == 3
    assert re.findall(r"^\$ (.+)$", README, re.MULTILINE)[:2] == ["make demo", "make test"]


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


@pytest.mark.nightly  # `make docs` builds them so, too
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", tmp_path / "trees"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path / "html"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    config = (tmp_path / "html" / "configuration.html").read_text(encoding="utf-8")
    rendered = re.findall(r"<code[^>]*><span class=\"pre\">(\w+)</span></code></p></td>\n<td>", config)
    assert set(Config.model_fields) <= set(rendered)
