"""Processor time of another thread, against the thread's own clock."""

from __future__ import annotations

import threading
import time

import pytest

from engine.thread_clock import ThreadClock


def test_computing_counts_and_waiting_does_not() -> None:
    clocks, own = list[ThreadClock](), list[float]()
    computed, done = threading.Event(), threading.Event()

    def work() -> None:
        clocks.append(ThreadClock())
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass
        computed.set()
        done.wait(20)
        own.append(time.thread_time() - began)

    thread = threading.Thread(target=work)
    thread.start()
    assert computed.wait(20)
    passed = clocks[0].passed_s()
    assert not done.wait(0.2)  # while this one waits, the other does too
    assert clocks[0].passed_s() == pytest.approx(passed, abs=0.02)
    done.set()
    thread.join()
    assert passed == pytest.approx(own[0], abs=0.05)
    assert clocks[0].passed_s() > 0.0
