"""Processes that share work: what cannot be sent, how many there are, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from data_sources import processes
from data_sources.processes import in_order

# Also of a process that imports this before it does anything else.
HELD_AT_IMPORT = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
DEEP = 900  # json reads this; pickle does not


def nested(depth):
    value: object = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def depth_of(value):
    depth = 0
    while isinstance(value, dict):
        value, depth = value["a"], depth + 1
    return depth


def _looked_at(part):
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return depth_of(part), os.getpid(), HELD_AT_IMPORT and ignored


def test_a_part_that_cannot_be_sent_is_done_here_and_interrupts_reach_no_process():
    parts = [nested(depth) for depth in (1, DEEP, 2, 3, DEEP, 4)]
    found = list(in_order(_looked_at, parts, 2))
    assert [depth for depth, _, _ in found] == [1, DEEP, 2, 3, DEEP, 4]
    for depth, number, deaf in found:
        assert (number == os.getpid()) == (depth == DEEP)
        assert deaf == (depth != DEEP)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def _sleeps_after_the_first(number):
    time.sleep(number and 100)
    return number


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_who_stops_waits_for_no_part(error):
    results = in_order(_sleeps_after_the_first, range(9), 1 + 1)
    assert next(results) == 0
    began = time.monotonic()
    with pytest.raises(error):
        results.throw(error)
    assert time.monotonic() - began < 20
    assert multiprocessing.active_children() == []


def test_no_more_processes_than_help(monkeypatch, caplog):
    asked = []

    class Pool:
        def __init__(self, workers, **_):
            asked.append(workers)

        def submit(self, *_):
            raise BrokenProcessPool("none here")

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    for workers in (2, 4, 5000):
        assert list(in_order(abs, [-1, -2, -3], workers)) == [1, 2, 3]
        assert ("data.workers = 5000" in caplog.text) == (workers == 5000)
    assert asked == [2, 4, 4]
