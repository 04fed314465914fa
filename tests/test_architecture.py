"""The folder rules, as a test: they fail like any other bug."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cluster.doctor.names import FOLDERS

ROOT = Path(__file__).parent.parent
NAMELESS = {
    "manager",
    "util",
    "utils",
    "helper",
    "helpers",
    "common",
    "base",
    "misc",
    "data",
    "info",
}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sizes_and_characters_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sizes.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_each_op_stands_alone() -> None:
    for path in sorted((ROOT / "kernels" / "ops").glob("*.py")):
        others = {name for name in imported(path) if name.startswith("kernels.ops")}
        assert not others, f"{path.name} imports {sorted(others)}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_is_and_has_a_name(path: Path) -> None:
    assert path.stem not in NAMELESS
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "a file opens by saying what it is"


def test_nothing_needs_the_world_outside_the_repository() -> None:
    """No path of one machine and no sibling folder in what is installed and run."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for forbidden in (f"{ROOT}/", "/root/", "/home/", "../shared"):
            assert forbidden not in text, f"{path.relative_to(ROOT)} names {forbidden}"


def test_the_doctor_looks_for_every_name_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(FOLDERS) == sorted(pattern.rstrip("*") for pattern in installed)
