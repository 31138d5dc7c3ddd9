"""Splitting text into passages: pieces of some sixty to a hundred and twenty words that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ENOUGH_WORDS = 60
MOST_WORDS = 120
FEW_WORDS = 20

_FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")
_ATX_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*$")
_UNDERLINE = re.compile(r"([=\-~^\"'`*+#])\1{2,}$")
_LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s")
_LINK_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+\[[^\]]*\]\([^)]*\)")
_NOISE = re.compile(r"\s*(:{3,}.*|\(\S+\)=|<[^>]+>|\.\. .*|[-*_=]{3,})$")
_TABLE_RULE = re.compile(r"\s*\|[\s:|-]+\|\s*$")
_INLINE = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # images
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),  # links
    (re.compile(r"\{[\w:.-]+\}`([^`<]+?)(\s*<[^>]*>)?`"), r"\1"),  # MyST's roles
    (re.compile(r":[\w:.-]+:`([^`<]+?)(\s*<[^>]*>)?`"), r"\1"),  # reStructuredText's roles
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])"), r"\1"),
    (re.compile(r"`+"), ""),
)


@dataclass(frozen=True)
class Passage:
    """A piece of a text.

    Attributes
    ----------
    file
        Where it is from.
    heading
        The heading above it; empty when there is none.
    text
        Paragraphs on one line each; lists, tables and code line by line.
    """

    file: str
    heading: str
    text: str

    @property
    def content(self) -> str:
        """What is compared with a question: heading and text on one line."""
        return " ".join(f"{self.heading}. {self.text}".split() if self.heading else self.text.split())


def split(text: str, file: str) -> list[Passage]:
    """Split a Markdown, reStructuredText or plain text into passages."""
    passages: list[Passage] = []
    for heading, blocks in _sections(text.splitlines()):
        pieces = [piece for block in blocks for piece in _cut(block)]
        passages += [Passage(file, heading, joined) for joined in _join(pieces)]
    return passages


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading with the blocks below it, up to the next heading."""
    heading, block, blocks = "", list[str](), list[str]()
    for kind, line in _classify(_without_front_matter(lines)):
        if kind in ("blank", "heading") and block:
            blocks.append(_flow(block))
            block = []
        if kind == "code":
            blocks.append(line)
        elif kind == "text":
            block.append(line)
        elif kind == "heading":
            if blocks:
                yield heading, blocks
            heading, blocks = line, []
    if block:
        blocks.append(_flow(block))
    if blocks:
        yield heading, blocks


def _without_front_matter(lines: list[str]) -> list[str]:
    if lines[:1] == ["---"] and "---" in lines[1:]:
        return lines[lines.index("---", 1) + 1 :]
    return lines


def _classify(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what each line is: ``heading``, ``text``, ``blank``, or a whole block of ``code``."""
    position = 0
    while position < len(lines):
        line = lines[position]
        following = lines[position + 1].strip() if position + 1 < len(lines) else ""
        position += 1
        fence = _FENCE.match(line)
        heading = _ATX_HEADING.match(line)
        if fence:
            end = _end_of_fence(lines, position, fence[1])
            yield "blank", ""
            if not fence[2].lstrip().startswith("{"):  # a directive is an instruction to Sphinx, not text
                yield "code", "\n".join(lines[position:end])
            position = end + 1
        elif heading:
            yield "heading", _plain(heading[1])
        elif line.strip() and _UNDERLINE.match(following) and not _NOISE.match(line):
            yield "heading", _plain(line.strip())
            position += 1
        elif not line.strip() or _NOISE.match(line):
            yield "blank", ""
        elif not _TABLE_RULE.match(line):
            yield "text", line


def _end_of_fence(lines: list[str], start: int, fence: str) -> int:
    for position in range(start, len(lines)):
        if lines[position].strip().startswith(fence) and not lines[position].strip(" `~"):
            return position
    return len(lines)


def _flow(lines: list[str]) -> str:
    """Join the lines of a paragraph; a list's items and a table's rows stay lines, a list of links says nothing."""
    if _is_list_of_links(lines):
        return ""
    flowed: list[str] = []
    for line in lines:
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            flowed.append(_plain(": ".join(cell for cell in cells if cell)))
        elif _LIST_ITEM.match(line) or not flowed:
            flowed.append(_plain(line.strip()))
        else:
            flowed[-1] = f"{flowed[-1]} {_plain(line.strip())}"
    return "\n".join(flowed)


def _is_list_of_links(lines: list[str]) -> bool:
    """Whether every item begins with a link: such a list only repeats what other passages say."""
    items = [line for line in lines if _LIST_ITEM.match(line)]
    return lines[0] in items and all(_LINK_ITEM.match(item) for item in items)


def _plain(line: str) -> str:
    for pattern, replacement in _INLINE:
        line = pattern.sub(replacement, line)
    return line.strip()


def _cut(block: str) -> Iterator[str]:
    """Cut a block that is too long: between lines, else between sentences, else between words."""
    if _words(block) <= MOST_WORDS:
        yield block
        return
    for separator, glue in (("\n", "\n"), (r"(?<=[.!?])\s+", " "), (r"\s+", " ")):
        parts = re.split(separator, block)
        if len(parts) > 1:
            for joined in _join(parts, glue):
                yield from _cut(joined)
            return


def _join(pieces: Iterable[str], glue: str = "\n\n") -> list[str]:
    """Join neighbours until there are enough words; few words at the end go with what is before them."""
    joined: list[str] = []
    for piece in pieces:
        if not piece.strip():
            continue
        fits = joined and _words(joined[-1]) < ENOUGH_WORDS and _words(joined[-1]) + _words(piece) <= MOST_WORDS
        if fits:
            joined[-1] = f"{joined[-1]}{glue}{piece}"
        else:
            joined.append(piece)
    if len(joined) > 1 and _words(joined[-1]) < FEW_WORDS:
        last = joined.pop()
        if _words(joined[-1]) + _words(last) > MOST_WORDS:
            joined.append(last)
        else:
            joined[-1] = f"{joined[-1]}{glue}{last}"
    return joined


def _words(text: str) -> int:
    return len(text.split())
