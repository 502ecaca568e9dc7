"""Encodes many rows in several processes; the result does not depend on how many.

Processes are spawned, not forked: a fork would copy the threads' locks of tokenizers, torch and
NCCL in whatever state they are.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context
from pickle import PicklingError
from typing import Any

from data_sources.encodings import Encoding
from data_sources.records import Record
from data_sources.token_files import Chunk, encode_chunk

log = logging.getLogger(__name__)

#: Rows of a task: enough that handing it over costs nothing, few enough to lie in memory.
CHUNK_ROWS = 2_000

_encoding: Encoding[Any] | None = None


def default_workers() -> int:
    """Cores of this machine that are left for each of its ranks, at least 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(ranks, 1))


def encoded_chunks(
    encoding: Encoding[Any],
    records: Sequence[Record],
    workers: int,
    *,
    chunk_rows: int = CHUNK_ROWS,
) -> Iterator[Chunk]:
    """Yields the records' chunks in their order.

    Where processes cannot start, or one is killed, this one does the rest.

    Args:
        encoding: of the stage.
        records: are read from the first to the last.
        workers: processes; 1 works in this one.
        chunk_rows: rows of a chunk.
    """
    starts = range(0, len(records), chunk_rows)
    parts = (records[start : start + chunk_rows] for start in starts)
    done = 0
    if workers > 1 and len(starts) > 1 and not current_process().daemon:
        try:
            for chunk in _by_processes(encoding, parts, min(workers, len(starts))):
                yield chunk
                done += 1
        except (BrokenProcessPool, PicklingError) as error:
            log.warning(
                "one of %d processes that encode rows could not start or was killed (is memory "
                "short? see data.workers); this process goes on alone: %s",
                workers,
                error,
            )
    for start in starts[done:]:
        yield encode_chunk(encoding, records[start : start + chunk_rows])


def _by_processes(
    encoding: Encoding[Any], parts: Iterable[Sequence[Record]], workers: int
) -> Iterator[Chunk]:
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_receive, initargs=(encoding,)
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(_work, part))
            # No more than this lies in memory, however slowly it is written.
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _receive(encoding: Encoding[Any]) -> None:
    global _encoding
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _encoding = encoding


def _work(records: Sequence[Record]) -> Chunk:
    assert _encoding is not None
    return encode_chunk(_encoding, records)
