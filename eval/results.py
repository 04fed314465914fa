"""The file of results: a line of settings, then a line an answer, each written when it is there.

A run that was interrupted goes on where it was: what is in the file is not asked again, and
nothing counts twice. Knows nothing of endpoints.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

Settings = Mapping[str, Any]

_HEAD = '{"settings": '  # what every such file begins with


class BadResults(ValueError):
    """Says which file, what is wrong with it, and what to do."""


@dataclass(frozen=True)
class Result:
    id: str  # of the question
    sample: int  # which answer to it
    kind: str
    answer: str  # what it should be
    text: str  # what the model wrote, whole: scoring reads it again
    finish: str | None
    completion_tokens: int


class Results:
    """Open for one run; `done` are (question, sample) of what is there already."""

    def __init__(self, file: TextIO, found: list[Result]) -> None:
        self._file = file
        self.results = found
        self.done = {(result.id, result.sample) for result in found}

    def add(self, result: Result) -> None:
        """In the file when this returns."""
        assert (result.id, result.sample) not in self.done
        self._file.write(json.dumps(asdict(result)) + "\n")
        self._file.flush()
        self.results.append(result)
        self.done.add((result.id, result.sample))


@contextmanager
def open_results(path: Path, settings: Settings) -> Iterator[Results]:
    """To go on with, or a new one; BadResults if it is of other settings or another run has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadResults(f"{path} is being written by another run") from None
        file.seek(0)
        text = _read(path, file)
        if not text.startswith(_HEAD[: len(text)]):
            raise BadResults(f"{path} is no file of results, so it is left as it is")
        whole, _, torn = text.rpartition("\n")
        if torn:  # a run was killed while it wrote this line
            file.truncate(len(whole.encode()) + 1 if whole else 0)
            file.seek(0, 2)
        lines = whole.splitlines()
        if not lines:
            file.write(json.dumps({"settings": settings}) + "\n")
            file.flush()
            yield Results(file, [])
            return
        there, found = _parsed(path, lines)
        if changed := [name for name in settings if settings[name] != there.get(name)]:
            raise BadResults(
                f"{path} has results of other settings ({', '.join(changed)}); go on with those, "
                "or choose another --out"
            )
        yield Results(file, found)


def read_results(path: Path) -> tuple[Settings, list[Result]]:
    """Of a run that has ended or still goes on; BadResults if it is no such file."""
    try:
        with path.open(encoding="utf-8") as file:
            whole = _read(path, file).rpartition("\n")[0]
    except OSError as error:
        raise BadResults(f"cannot read {path}: {error.strerror}") from error
    return _parsed(path, whole.splitlines())


def _read(path: Path, file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise BadResults(f"{path} is no file of results: {error}") from error


def _parsed(path: Path, lines: list[str]) -> tuple[Settings, list[Result]]:
    """Of equal question and sample the first counts."""
    try:
        head, *rest = (json.loads(line) for line in lines)
        results: dict[tuple[str, int], Result] = {}
        for line in rest:
            result = Result(**line)
            results.setdefault((result.id, result.sample), result)
        settings: Settings = head["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadResults(f"{path} is no file of results: {error}") from error
    return settings, list(results.values())
