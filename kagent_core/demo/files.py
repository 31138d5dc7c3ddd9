"""Which text the demo searches: kagent's own docs, or the user's files."""

from __future__ import annotations

import os
from pathlib import Path

import kagent_core
from kagent_core.errors import KagentError

SUFFIXES = (".md", ".txt", ".rst")


def own_docs() -> list[tuple[str, Path]]:
    """Return kagent's docs, each with the name to show: those in the wheel, else those in the checkout.

    Raises
    ------
    KagentError
        When there are none, as in a package built without them.
    """
    package = Path(kagent_core.__file__).parent
    if (package / "_docs").is_dir():
        found = find_texts(package / "_docs")
    else:
        root = package.parent
        readme = [path for path in (root / "README.md",) if path.is_file()]
        found = [(path.name, path) for path in readme] + find_texts(root / "docs", "docs/")
    if not found:
        raise KagentError(
            "kagent's own docs are not installed here",
            hint='search your own text files: `kagent demo --text DIR --query "..."`',
        )
    return found


def users_files(directory: Path) -> list[tuple[str, Path]]:
    """Return the text files in a user's directory, each with its path from there.

    Raises
    ------
    KagentError
        When it is no directory, or has no text files.
    """
    if not directory.is_dir():
        raise KagentError(
            f"'{directory}' is {'a file' if directory.exists() else 'not there'}, expected a directory",
            hint="name a directory that holds text files",
        )
    found = find_texts(directory)
    if not found:
        raise KagentError(
            f"there is no text file in '{directory}'",
            hint=f"put files there that end in {', '.join(SUFFIXES)}",
        )
    return found


def find_texts(directory: Path, prefix: str = "") -> list[tuple[str, Path]]:
    """Return the text files below a directory, by name, without those that are hidden or were built."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "_"))]
        found += [Path(folder, name) for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
    return sorted((prefix + path.relative_to(directory).as_posix(), path) for path in found)
