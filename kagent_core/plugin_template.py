"""Rendering the plugin template: a device plugin to begin with, that works from the first day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kagent_core
from kagent_core.errors import KagentError, nearest

SHAPES = ("language", "kernels")
"""What a device's driver takes: kernels in a C-like language, or calls of the kernels that it has."""

LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause", "Proprietary")
"""What the template knows the text of."""

TAKEN = frozenset({"auto", "cpu", "cuda", "fake", "opencl", "core", "torch"})
"""Device types that are kagent's own, and names that its distributions have."""


def template_folder() -> Path:
    """Return where the template lies: in the wheel, else in the checkout.

    Raises
    ------
    KagentError
        When it is not there, as in a package that was built without it.
    """
    package = Path(kagent_core.__file__).parent
    for folder in (package / "_plugin_template", package.parent / "plugin_template"):
        if (folder / "copier.yml").is_file():
            return folder
    raise KagentError(
        f"the plugin template is not installed: it is neither in '{package}' nor beside it",
        hint="install kagent-torch from a wheel that `make dist` built, or work in a checkout of kagent",
    )


def check_name(name: str) -> None:
    """Check the device type of a new plugin.

    Raises
    ------
    KagentError
        When no device can be called so.
    """
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
        better = re.sub("[^a-z0-9_]", "", name.lower()).lstrip("0123456789_") or "toy"
        raise KagentError(
            f"'{name}' is not a device type, expected lower-case letters, digits and underscores, a letter first",
            hint=f"for example `kagent new-plugin {better}`",
        )
    if name in TAKEN:
        raise KagentError(f"the device type '{name}' is kagent's own", hint="call the new device something else")


def render(name: str, folder: Path, answers: Mapping[str, Any], ask: bool) -> None:
    """Render the template into a folder, which must be empty or not there.

    Parameters
    ----------
    name
        The device type.
    folder
        Where to.
    answers
        To the template's other questions: ``title``, ``shape``, ``author``, ``license``.
    ask
        Whether questions without an answer are asked on the terminal; else defaults are taken.

    Raises
    ------
    KagentError
        When the name or an answer is none that the template knows, or something is in the folder.
    """
    check_name(name)
    for question, choices in (("shape", SHAPES), ("license", LICENSES)):
        given = answers.get(question)
        if given is not None and given not in choices:
            close = nearest(str(given), choices)
            raise KagentError(
                f"{question} is '{given}', expected {', '.join(choices[:-1])} or {choices[-1]}",
                hint=f"did you mean '{close}'?" if close else None,
            )
    for question in ("title", "author"):
        given = answers.get(question)
        if given is not None and (not str(given).strip() or '"' in str(given) or "\n" in str(given)):
            raise KagentError(f"{question} is {given!r}, expected one line without double quotes")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KagentError(
            f"'{folder}' is not empty, and nothing in it is overwritten",
            hint="name another folder with --into, or empty this one",
        )
    from copier import run_copy

    run_copy(str(template_folder()), folder, data={"name": name, **answers}, defaults=not ask, quiet=True)
