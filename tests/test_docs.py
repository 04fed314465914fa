"""Python in the documentation: what it imports is there, and every name that it uses is bound."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from pathlib import Path

import pytest

from cluster.doctor.names import FOLDERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(page: Path) -> list[ast.Module]:
    return [ast.parse(text) for text in SNIPPET.findall(page.read_text(encoding="utf-8"))]


def unbound(snippet: ast.Module, bound: set[str]) -> set[str]:
    """Names that are read; those that are written are added to `bound`."""
    read: set[str] = set()
    for node in ast.walk(snippet):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound.update((one.asname or one.name).partition(".")[0] for one in names)
    return read - bound - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_bind_what_they_use_and_import_what_there_is(page: Path) -> None:
    bound: set[str] = set()  # a later snippet of a page may go on from an earlier one
    for snippet in snippets(page):
        assert not unbound(snippet, bound)
        for node in ast.walk(snippet):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOLDERS:
                found = importlib.import_module(node.module or "")
                assert not [one.name for one in node.names if not hasattr(found, one.name)]


def test_a_name_without_its_import_is_found() -> None:
    snippet = ast.parse('digits = Grammar(kind="regex")\nprint(digits)')
    assert unbound(snippet, set()) == {"Grammar"}
