"""What is kept for a writer is freed by its word or its death, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from decode_worker.writers import Writers
from kv_transfer.process_life import Life, Unwatched, Watch, life_of
from tests.tiny import until


class Process:
    """One that does nothing until it is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def life(self) -> Life:
        return life_of(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.kill()


@pytest.fixture
async def writers() -> Writers:
    return Writers()


async def test_a_word_frees_what_it_names_and_nothing_else(
    writers: Writers, process: Process
) -> None:
    freed: list[str] = []
    writers.met("p", Watch(process.life))
    writers.begin("p", "r1", lambda: freed.append("r1"))
    writers.begin("p", "r2", lambda: freed.append("r2"))
    writers.said("p", "r1")
    writers.said("p", "r1")
    writers.said("p", "never heard of")
    writers.said("somebody else", "r2")
    assert freed == ["r1"]
    writers.close()


async def test_a_broken_connection_frees_nothing_and_the_end_of_the_process_all(
    writers: Writers, process: Process
) -> None:
    freed: list[str] = []
    writers.met("p", Watch(process.life))
    writers.begin("p", "r1", lambda: freed.append("r1"))
    writers.begin("p", "r2", lambda: freed.append("r2"))
    writers.parted("p")
    assert writers.knows("p")  # for as long as something is kept
    assert not freed
    process.kill()
    await until(lambda: len(freed) == 2)
    assert not writers.knows("p")
    writers.said("p", "r1")
    assert sorted(freed) == ["r1", "r2"]
    writers.close()


async def test_who_is_connected_twice_is_known_until_both_have_ended(
    writers: Writers, process: Process
) -> None:
    writers.met("p", Watch(process.life))
    writers.met("p", Watch(process.life))
    writers.parted("p")
    assert writers.knows("p")
    writers.parted("p")
    assert not writers.knows("p")
    writers.parted("p")


async def test_a_writer_whose_end_cannot_be_seen_has_to_say_it(writers: Writers) -> None:
    """On another host: there somebody else would have to tell."""
    freed: list[str] = []
    writers.met("far", Unwatched())
    writers.begin("far", "r1", lambda: freed.append("r1"))
    writers.parted("far")
    assert not freed
    writers.said("far", "r1")
    assert freed == ["r1"]
    assert not writers.knows("far")
