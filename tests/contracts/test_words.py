"""The promise: names, docstrings, messages and docs use the field's words, and none of those that were retired."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from measures import tree_of

ROOT = Path(__file__).resolve().parents[2]

# What to write instead. Weights are stored and copied; they do not rest, arrive, wake, settle or travel.
RETIRED = {
    r"rests|rested|resting|at rest|(?:to|let|weights|bytes|units?|they|may|can|must|that) rest|rest (?:in|on) (?!of)": (
        "is stored in; a placeholder"
    ),
    r"arriv(?:e|es|ed|ing)|travel(?:s|led|ling)?": "is copied, received, complete",
    r"settl\w+": "finalize, resolve, join, compact",
    r"wakes?|woken|waking|awake": "on access, materialize",
    r"lets? go|letting go": "release, free",
    r"in vain": "cancelled, unused",
    r"(?<=, )say(?=[,;:.)]|$)": "for example",
    r"misfits?": "shortage",
    r"lends?|lent|loans?|reviv\w+": "temporary copy, release_copy, original_memory",
}
WORDS = {instead: re.compile(rf"(?<![\w-])(?:{pattern})(?!\w)", re.IGNORECASE) for pattern, instead in RETIRED.items()}

# (end of the file's name, text): a word of another library, or of the reader's own language.
ALLOWED = {
    ("transfer/ring.py", "thread has to be woken"),
    ("vllm/worker.py", "wake up"),
    *((f"{name}.py", "wake_up(") for name in ("offloaders/layerwise", "lifetime/sleeping")),
}

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "benchmarks"),  # dated reports
]


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Names, strings and comments of a module, with their lines; a name as words."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], re.sub(r"(?<=[a-z])(?=[A-Z])", " ", token.string).replace("_", " ")
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


@cache
def matches(line: str) -> list[str]:
    found = ((match[0].strip(), instead) for instead, each in WORDS.items() for match in each.finditer(line))
    return [f"{word!r} (write: {instead})" for word, instead in found]


def retired(file: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    name = str(file.relative_to(ROOT))
    return [
        f"{name}:{number}: {match}"
        for number, line in lines
        for match in matches(line)
        if not any(name.endswith(end) and text in line for end, text in ALLOWED)
    ]


@pytest.mark.slow
def test_the_package() -> None:
    found = [each for file in sorted((ROOT / "src").rglob("*.py")) for each in retired(file, texts(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_docs(page: Path) -> None:
    found = retired(page, iter(enumerate(page.read_text().splitlines(), 1)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "the weights rest in files",
        "bytes that have arrived",
        "def settle_rules",
        "a resting tensor",
        "wake up",
        "give x, say",
        "def loan_of",
    ],
)
def test_a_retired_word_is_found(line: str) -> None:
    assert matches(line.replace("_", " "))


@pytest.mark.parametrize(
    "line", ["the rest of the list", "rest = args[1:]", "they say so", "restore", "the rest in order"]
)
def test_plain_language_is_not(line: str) -> None:
    assert not matches(line)


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Not with a word that makes the reader look elsewhere for the subject."""
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if re.match(r"(Of|Those|What|Where|As|By|It|That|They|The same)\b", text):
                    found.append(f"{file.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
