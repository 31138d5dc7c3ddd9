"""Text with indentation."""

from __future__ import annotations

from dataclasses import dataclass, field


def bare(text: str) -> str:
    """Return a text without the one pair of brackets that is around all of it.

    Examples
    --------
    >>> bare("(a + b)"), bare("(a) + (b)"), bare("((a + b))")
    ('a + b', '(a) + (b)', '(a + b)')
    """
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text


@dataclass
class Text:
    """Lines with indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def add(self, *lines: str) -> None:
        """Add lines at the current depth."""
        self.lines.extend("    " * self.depth + line for line in lines)

    def open(self, line: str) -> None:
        """Add a line that opens a block, and go one level deeper."""
        self.add(line)
        self.depth += 1

    def close(self, count: int = 1) -> None:
        """Close some blocks."""
        for _ in range(count):
            self.depth -= 1
            self.add("}")
