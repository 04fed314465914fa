"""Are Python and the packages of the versions that this code was written for?"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cluster.doctor.finding import Check, Finding

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ray", "torch", "nixl", "triton")
DISTRIBUTION = "tandem-serve"


def version_checks() -> list[Check]:
    """One for Python and one for each package that decides whether ranks can run."""
    python, needed = wanted()
    checks = [Check("python", lambda: judge_python(sys.version.split()[0], python))]
    for name in PACKAGES:
        if name in needed:
            checks.append(Check(name, _package_check(name, needed[name])))
    return checks


def judge_python(found: str, wanted: str) -> Finding:
    if found in SpecifierSet(wanted):
        return Finding("python", "ok", f"{found} at {sys.executable}")
    return Finding(
        "python",
        "fail",
        f"{found} at {sys.executable} is not {wanted}",
        "make the virtual environment with a Python of that range: make install PYTHON=...",
    )


def judge_package(name: str, found: str | None, needed: Requirement) -> Finding:
    """`found` is None where the package is missing."""
    install = f"pip install '{needed}'"
    if found is None:
        return Finding(name, "fail", f"is not installed; {needed} is needed", install)
    if needed.specifier.contains(found, prereleases=True):
        return Finding(name, "ok", found)
    return Finding(name, "fail", f"{found} is not {needed.specifier}", install)


def wanted() -> tuple[str, Mapping[str, Requirement]]:
    """Range of Python, and what applies to this machine of the requirements, by package.

    From pyproject.toml beside the code, else from the installed distribution.
    """
    file = ROOT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        python, lines = project["requires-python"], project["dependencies"]
    else:
        told = metadata.metadata(DISTRIBUTION)
        python, lines = told["Requires-Python"], metadata.requires(DISTRIBUTION) or []
    requirements = [Requirement(line) for line in lines]
    return python, {
        one.name: one
        for one in requirements
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def _package_check(name: str, needed: Requirement) -> Callable[[], Finding]:
    def run() -> Finding:
        try:
            found: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = None
        return judge_package(name, found, needed)

    return run
