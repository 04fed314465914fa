"""deploy/Dockerfile, instruction by instruction: no daemon is needed to see what it would do."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KNOWN = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Keyword and the rest, with continued lines joined and comments dropped."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        keyword, _, rest = line.partition(" ")
        found.append((keyword, " ".join(rest.split())))
    return found


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for keyword, rest in instructions():
        if keyword == "FROM":
            found.append([])
        found[-1].append((keyword, rest))
    return found


def test_it_has_two_stages_of_one_pinned_base_that_the_product_supports() -> None:
    assert {keyword for keyword, _ in instructions()} <= KNOWN
    build, final = stages()
    base = build[0][1].removesuffix(" AS build")
    assert base != build[0][1]
    assert final[0][1] == base
    assert base.startswith("python:3.12-")  # a version and a distribution, never "latest"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.13"


def test_what_is_copied_exists_and_every_folder_of_the_product_is_copied() -> None:
    copied = [
        source for keyword, rest in stages()[0] if keyword == "COPY" for source in rest.split()[:-1]
    ]
    assert not [source for source in copied if not (ROOT / source).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {one.removesuffix("*") for one in packages} | {"deploy", "examples"} <= set(copied)
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied} <= set(ignored)
    assert "*" in ignored


def test_dependencies_are_pinned_and_installed_before_the_code() -> None:
    build = stages()[0]
    installs = [n for n, (keyword, rest) in enumerate(build) if "pip install" in rest]
    first_code = next(n for n, one in enumerate(build) if one == ("COPY", "cluster cluster"))
    first, last = installs
    assert first < first_code < last
    assert "-c constraints.txt" in build[first][1]
    assert "--no-deps" in build[last][1]
    assert all("--no-cache-dir" in build[n][1] for n in installs)


def test_the_final_image_runs_as_a_user_whose_number_kubernetes_can_check() -> None:
    final = stages()[1]
    users = [rest for keyword, rest in final if keyword == "USER"]
    assert users == ["1000"]
    made = next(rest for keyword, rest in final if keyword == "RUN")
    assert "useradd --uid 1000" in made
    assert final[-1] == ("CMD", '["tandem", "doctor"]')
    after = [keyword for keyword, _ in final[final.index(("USER", "1000")) :]]
    assert "RUN" not in after
    assert "COPY" not in after


def test_stages_agree_on_where_things_lie() -> None:
    build, final = stages()
    for stage in (build, final):
        assert ("WORKDIR", "/opt/tandem") in stage
    taken = [rest for keyword, rest in final if keyword == "COPY"]
    assert taken == ["--from=build /opt/venv /opt/venv", "--from=build /opt/tandem /opt/tandem"]
    assert any("/opt/venv/bin:$PATH" in rest for keyword, rest in final if keyword == "ENV")


def test_probes_of_the_manifests_find_their_programs() -> None:
    made = next(rest for keyword, rest in stages()[1] if keyword == "RUN")
    for manifest in (ROOT / "deploy" / "kuberay").glob("*.yaml"):
        assert "wget" in manifest.read_text()
    assert " wget " in made
