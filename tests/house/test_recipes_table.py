"""The table of words in tests/rdma/README.md and the device tests that it was made from stay in step."""

from __future__ import annotations

import ast
import re

import pytest
from places import TESTS

from rdmaconnect import errors

FOLDER = TESTS / "rdma"
TESTS = {
    f"{path.stem}.{node.name}": node
    for path in sorted(FOLDER.glob("test_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
}
#: recipe, test, words at one end, words at the other
WORDS = re.compile(r"^\| (R\d\d) \| ([\w.]+)(?:\[[\w-]+\])? \| (\w+) \| (.+?) \| (?:(\w+): (.+?)|-) \|$", re.M)
#: recipe, what is to be seen, tests
ELSEWHERE = re.compile(r"^\| (R\d\d) \| ([^|]+) \| (test_[\w., ]+) \|$", re.M)
README = (FOLDER / "README.md").read_text()
ROWS = WORDS.findall(README)
#: all that were given, by number
RECIPES = {f"R{n:02}" for n in (*range(1, 7), *range(8, 16), 18, 19, 20, 23, 24, 25, 28, 29, 30, 31, 33, 34)}


def said(test: str) -> list[tuple[str, str]]:
    """(class, pattern) of what a test asserts to be told; "" for a pattern that is made while it runs."""
    found = []
    for node in ast.walk(TESTS[test]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "says":
            cls, words = node.args[:2]
            constant = isinstance(words, ast.Constant) and isinstance(words.value, str)
            classes = cls.elts if isinstance(cls, ast.Tuple) else [cls]
            pattern = words.value if constant else ""
            found += [(ast.unparse(one).rpartition(".")[2], pattern) for one in classes]
    return found


def test_the_table_has_twenty_recipes_and_more() -> None:
    assert len(ROWS) >= 20
    assert len({(recipe, test) for recipe, test, *_ in ROWS}) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_each_row_is_what_a_test_asserts(row: tuple[str, ...]) -> None:
    _, test, *told = row
    assert test in TESTS
    for cls, words in zip(told[::2], told[1::2], strict=True):
        if cls:
            assert cls == "OSError" or cls in errors.__all__
            assert any(cls == c and re.search(pattern, words) for c, pattern in said(test)), (cls, words)


def test_each_test_that_asserts_words_has_a_row() -> None:
    named = {test for _, test, *_ in ROWS}
    assert {test for test in TESTS if said(test)} - named == set()


def test_the_tests_elsewhere_are_there() -> None:
    for _, _, tests in ELSEWHERE.findall(README):
        for test in tests.split(", "):
            assert test in TESTS, test


def test_every_recipe_is_accounted_for() -> None:
    told = {row[0] for row in ROWS} | {row[0] for row in ELSEWHERE.findall(README)}
    assert told == RECIPES
