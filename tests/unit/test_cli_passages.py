"""The demo's text: which files it takes, and how it splits them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kagent_core.demo.files import find_texts, own_docs, users_files
from kagent_core.demo.passages import MOST_WORDS, Passage, split
from kagent_core.errors import KagentError

MARKDOWN = """---
title: not text
---
(label)=
# Fruit

An apple is **red**, see [the list](list.md) and {ref}`the table <tab>`,
or `green`. ![picture](apple.png)

```{toctree}
not-text
```

## How to *cook* it

- peel it;
- boil it
  for long.

| fruit | minutes |
|-------|---------|
| pear  | 10      |

```python
cook(
    "apple")
```
"""


def test_markdown_becomes_passages_by_heading() -> None:
    assert split(MARKDOWN, "fruit.md") == [
        Passage("fruit.md", "Fruit", "An apple is red, see the list and the table, or green."),
        Passage(
            "fruit.md",
            "How to cook it",
            '- peel it;\n- boil it for long.\n\nfruit: minutes\npear: 10\n\ncook(\n    "apple")',
        ),
    ]


def test_restructured_text_has_underlined_headings() -> None:
    text = "=====\nFruit\n=====\n\n.. toctree::\n\nSee :ref:`pears <p>`.\n\nNuts\n----\nHard.\n"
    assert [(p.heading, p.text) for p in split(text, "f.rst")] == [("Fruit", "See pears."), ("Nuts", "Hard.")]


def test_a_comment_in_code_is_no_heading() -> None:
    [passage] = split("~~~\n# not a heading\n~~~\n", "a.md")
    assert passage == Passage("a.md", "", "# not a heading")


def test_short_paragraphs_are_joined_and_long_ones_cut_between_sentences() -> None:
    sentences = [f"This is sentence number {number} of a rather long paragraph." for number in range(30)]
    passages = split("Short.\n\nAlso short.\n\n" + " ".join(sentences), "a.txt")
    joined = " ".join(passage.text for passage in passages)
    assert joined == "Short.\n\nAlso short.\n\n" + " ".join(sentences)
    assert len(passages) > 2
    assert all(passage.text.endswith(".") for passage in passages)
    assert all(len(passage.text.split()) <= MOST_WORDS for passage in passages)


@given(st.lists(st.sampled_from(["word", "end.", "\n", "\n\n", "- item", "x" * 30]), max_size=600))
def test_no_word_is_lost_and_no_passage_too_long(pieces: list[str]) -> None:
    text = " ".join(pieces)
    passages = split(text, "a.txt")
    assert " ".join(passage.text for passage in passages).split() == text.split()
    assert all(0 < len(passage.text.split()) <= MOST_WORDS for passage in passages)


def test_what_is_compared_has_the_heading() -> None:
    assert Passage("a.md", "Fruit", "An\n\napple.").content == "Fruit. An apple."
    assert Passage("a.md", "", "An\n\napple.").content == "An apple."


def test_texts_are_found_below_a_directory(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "deep/er/c.rst", "d.py", ".hidden/e.md", "_build/f.md", ".g.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [name for name, _ in find_texts(tmp_path)] == ["a.txt", "b.md", "deep/er/c.rst"]


def test_a_directory_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KagentError, match=r"there is no text file in .*\n  hint: put files there that end in \.md"):
        users_files(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.touch()
    with pytest.raises(KagentError, match="is a file, expected a directory"):
        users_files(file)
    with pytest.raises(KagentError, match="is not there, expected a directory"):
        users_files(tmp_path / "nowhere")


def test_kagents_own_docs_are_found() -> None:
    names = [name for name, _ in own_docs()]
    assert names
    assert all(path.is_file() for _, path in own_docs())


def test_a_list_of_links_is_no_passage():
    assert split("- [a](a.md): b\n- [c](c.md): d\n", "index.md") == []
    [passage] = split("Read [this](a.md) before you go on with the rest of it.\n", "index.md")
    assert passage.text == "Read this before you go on with the rest of it."
