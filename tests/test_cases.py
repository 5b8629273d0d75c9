"""CASES.md names tests that are there, and each carries the tag of its case."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def source_of(place: str) -> str:
    """Text of a test with its decorators and signature; the line comment after its closing bracket included."""
    file, name = place.split("::")
    text = (TESTS / file).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"tests/CASES.md: tests/{file} has no {name}")


def test_every_case_has_a_test_that_is_there_and_says_so() -> None:
    lines = [line for line in (TESTS / "CASES.md").read_text(encoding="utf-8").splitlines() if line.startswith("- G")]
    for number, line in enumerate(lines, start=1):
        case, name, places = line.removeprefix("- ").split(" · ")
        assert case == f"G{number}"
        assert name
        for place in places.split(", "):
            assert re.search(rf"\b{case}\b", source_of(place)), f"{place} does not say {case}"
    assert len(lines) == 48
