"""Hold the voice: short sentences in README and docs, no private words in the source.

`python -m tests.project.test_voice` prints the median and every sentence that is too long.
Inline code and formulas count as one word. Code blocks, headings and formulas on lines of their own
are no sentences. Table cells must obey the longest length, but do not count in the median.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MEDIAN_WORDS = 18
MOST_WORDS = 35

# Words that only this project once used, and the field's own word for each.
PRIVATE = {
    "apart": "distance",
    "bridge": "layer problem",
    "crew": "process group",
    "demands": "feasibility checks",
    "hear": "all_gather",
    "hollow": "counts_only",
    "journal": "run store",
    "lean": "single_copy",
    "mine": "overwrite",
    "missed": "residual",
    "outlook": "budget preview",
    "said": "logged",
    "settled": "finished",
    "tell": "broadcast",
    "told": "logged",
}
VAGUE = ("so many", "so much of", "what is what", "and so on and so forth")

# A word may stand inside an identifier: `_told`, `told_by`, `toldSo`; not inside another word.
PRIVATE_WORD = re.compile(rf"(?<![A-Za-z])((?i:{'|'.join(PRIVATE)}))(?![a-z])")
FENCE = re.compile(r"^( *)```.*?^\1```", flags=re.S | re.M)
ABBREVIATION = re.compile(r"\b(al|e\.g|i\.e|cf|vs|No|Eq|[A-Z])\.(?=\s)")
END = re.compile(r"(?<=[.!?])[\"”)*_]*\s+(?=[\"“(*_`]*[A-Z0-9Ψ])")
BULLET = re.compile(r"^\s*([-*+]|\d+\.)\s+")


def plain(text: str) -> str:
    """Drop what is not prose, and make one word of each piece of inline code."""
    text = FENCE.sub("\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"(`+)(?!`).+?\1", "code", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>", "", text)


def paragraphs(text: str) -> tuple[list[str], list[str]]:
    """Split a page into paragraphs of prose and table cells."""
    prose, cells, current = [], [], []
    for line in [*plain(text).splitlines(), ""]:
        bullet = BULLET.match(line)
        aside = line.startswith(("#", "|", ":::", "---", "===", "!!!"))
        formula = line.startswith("    ") and not current
        if bullet or aside or formula or not line.strip():
            prose.append(" ".join(current))
            current = [line[bullet.end() :]] if bullet else []
        else:
            current.append(line.strip())
        if line.startswith("|"):
            cells += [cell.strip() for cell in line.strip("| \n").split("|")]
    return [each for each in prose if each], [each for each in cells if each]


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph where a sentence ends."""
    whole = ABBREVIATION.sub(r"\1", paragraph)
    return [part for part in END.split(whole) if words(part)]


def words(sentence: str) -> int:
    """Count the words: pieces between spaces that hold a letter or a digit."""
    return sum(any(letter.isalnum() for letter in piece) for piece in sentence.split())


def counted(pages: list[Path]) -> tuple[list[int], list[str]]:
    """Return the lengths of all sentences of prose, and each sentence or cell that is too long."""
    lengths, long = [], []
    for page in pages:
        prose, cells = paragraphs(page.read_text(encoding="utf-8"))
        found = [sentence for paragraph in prose for sentence in sentences(paragraph)]
        lengths += [words(sentence) for sentence in found]
        found += [sentence for cell in cells for sentence in sentences(cell)]
        long += [
            f"{page.name}: {words(sentence)} words: {sentence}"
            for sentence in found
            if words(sentence) > MOST_WORDS
        ]
    return lengths, long


def private_words(text: str) -> list[tuple[int, str]]:
    """Return line numbers and private words of a text."""
    return [
        (number, found[1])
        for number, line in enumerate(text.splitlines(), 1)
        for found in PRIVATE_WORD.finditer(line)
    ]


def test_the_median_sentence_of_readme_and_docs_is_short():
    lengths, _ = counted(PAGES)
    assert len(lengths) > 300
    assert statistics.median(lengths) <= MEDIAN_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_long(page):
    assert counted([page])[1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_no_private_or_vague_words(page):
    text = page.read_text(encoding="utf-8")
    assert private_words(text) == []
    assert [phrase for phrase in VAGUE if phrase in text.lower()] == []


def test_the_source_uses_no_private_words():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}, say '{PRIVATE[word.lower()]}'"
        for path in SOURCES
        for number, word in private_words(path.read_text(encoding="utf-8"))
    ]
    assert len(SOURCES) > 100
    assert found == []


def test_the_rules_find_what_they_look_for():
    long = "Word" + " word" * 35 + "."
    assert [words(each) for each in sentences(f"One two. Meng et al. 2024 wrote it. {long}")] == [
        2,
        6,
        36,
    ]
    assert paragraphs("# Title\n\nA `b c` d.\n- One.\n- Two\n  lines.\n\n| a | b c |\n|---|---|\n")[
        0
    ] == ["A code d.", "One.", "Two lines."]
    assert [
        word for _, word in private_words("_told, Told, toldSo, retold, crewed, apart_from")
    ] == [
        "told",
        "Told",
        "told",
        "apart",
    ]


if __name__ == "__main__":
    measured, too_long = counted(PAGES)
    print(f"{len(measured)} sentences, median {statistics.median(measured):g} words")  # noqa: T201
    print("\n".join(too_long))  # noqa: T201
    for each in PAGES:
        own, over = counted([each])
        if own:
            print(f"{each.name}: median {statistics.median(own):g}, {len(over)} too long")  # noqa: T201
