"""Settings of the documentation's build: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import kagent_core
from kagent_core.config import Config, config_rows

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "kagent"
author = "The kagent authors"
copyright = "The kagent authors"
release = version = kagent_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"kagent {release}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist", "smartquotes"]
myst_heading_anchors = 3

# `name` in a docstring is a link where there is something to link to
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


class ConfigKeys(SphinxDirective):
    """``{config-keys}``: a table of every key of the Config class, so that the page cannot fall behind it."""

    def run(self) -> list[nodes.Node]:
        rows = []
        for row in config_rows(Config(), {}):
            field = Config.model_fields[row.key]
            own = field.default_factory is not None  # differs from machine to machine
            default = "the user's cache directory" if own else f"`{row.value}`" if row.value else "(empty)"
            rows.append(f"| `{row.key}` | {default} | {row.description} |")
        table = ["| key | default | what it means |", "|---|---|---|", *rows]
        return self.parse_text_to_nodes("\n".join(table))


RESULTS = Path(__file__).parent / "conformance"


class ConformanceResults(SphinxDirective):
    """``{conformance-results}``: a row for each report that ``make conformance-full`` has written."""

    def run(self) -> list[nodes.Node]:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
        if not reports:
            return self.parse_text_to_nodes("Not run for these pages: `make conformance-full` writes the results.")
        rows = ["| device | result | native | fallback | failed | expected to fail | could not run | run |"]
        rows.append("|---|---|---|---|---|---|---|---|")
        rows += [self._row(report) for report in reports]
        return self.parse_text_to_nodes("\n".join(rows))

    @staticmethod
    def _row(report: dict[str, Any]) -> str:
        counts = {key: sum(level[key] for level in report["levels"]) for key in ("native", "fallback", "expected")}
        failed = sum(level["failed"] + level["unexpected"] for level in report["levels"])
        left = sum(level["could_not_run"] for level in report["levels"])
        numbers = (counts["native"], counts["fallback"], failed, counts["expected"], left)
        size = "full" if report["full"] else "quick"
        run = f"{report['started'][:10]}, {size} size, kagent {report['versions']['kagent']}, "
        run += f"torch {report['versions']['torch']}"
        emulated = ", emulated" if report["emulated"] else ""
        cells = [f"`{report['device']}` ({report['name']}{emulated})", report["badge"], *map(str, numbers), run]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("conformance-results", ConformanceResults)
    app.add_directive("config-keys", ConfigKeys)
    return {"parallel_read_safe": True}
