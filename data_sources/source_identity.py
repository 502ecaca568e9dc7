"""Whether a source still holds what was read of it: a name that follows from all that decides.

That is the content of its files, the settings of the source, this package's code, the user's
normaliser, and the libraries that parse.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import data_sources
from data_sources.compressed import is_compressed
from data_sources.hub import DatasetRows
from data_sources.raw_rows import Rows
from data_sources.remote import RemoteFile
from data_sources.sources import FileRows
from rlhf_app.config.functions import names_function
from rlhf_app.config.schema import SourceConfig
from rlhf_app.function_hash import function_hash

#: Smaller sources are read anew by every process: that takes a second, and no disk.
LARGE_BYTES = 16 * 2**20
#: The same of datasets, whose bytes are not known.
LARGE_ROWS = 20_000
# Text is about four times as long as its compressed form.
_COMPRESSED = 4
_BLOCK = 2**22
_LIBRARIES = ("datasets", "pyarrow")
# What decides which records are used, and not what they are.
_ELSEWHERE = {"path", "weight", "max_rows", "stages", "prompts_only"}


def is_large(rows: Rows) -> bool:
    """Returns whether a source is worth preparing once for all processes.

    Args:
        rows: of `read_source`, none of them taken.
    """
    if isinstance(rows, DatasetRows):
        return len(rows.dataset) >= LARGE_ROWS
    if not isinstance(rows, FileRows):
        return False
    sizes = [_size(file) * (_COMPRESSED if is_compressed(file.name) else 1) for file in rows.files]
    return sum(sizes) >= LARGE_BYTES


def is_small_file(rows: Rows) -> bool:
    """Returns whether a source is a file or several here that a second is enough for.

    Args:
        rows: of `read_source`, none of them taken.
    """
    here = isinstance(rows, FileRows) and all(isinstance(file, Path) for file in rows.files)
    return here and not is_large(rows)


def source_identity(
    source: SourceConfig, rows: Rows, *, verbatim: bool, evaluation: bool, known: Path
) -> str | None:
    """Returns the name of the records that a source gives, 32 hexadecimal digits.

    Args:
        source: path, split, column names and normaliser.
        rows: of `read_source`, none of them taken.
        verbatim: as for `load_source`.
        evaluation: the same.
        known: directory that remembers the hashes of files which have not been touched since.

    Returns:
        The name, or None where nothing tells whether the content has changed.
    """
    if isinstance(rows, DatasetRows):
        contents = [_dataset_name(rows)]
    elif isinstance(rows, FileRows):
        contents = [_content(file, known) for file in rows.files]
    else:
        return None
    normaliser = source.normaliser or ""
    code = function_hash(normaliser) if names_function(normaliser) else "none"
    if not code or not all(contents):
        return None
    facts = [
        source.model_dump(mode="json", exclude=_ELSEWHERE),
        Path(source.path).name,  # records carry it
        [*zip(_names(rows), contents, strict=True)],
        [verbatim, evaluation, code],
        [version(name) for name in _LIBRARIES],
    ]
    found = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for path in sorted(Path(data_sources.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def source_state(source: SourceConfig, rows: Rows) -> list[object]:
    """Returns what changes whenever what `source_identity` has looked at is written to.

    Args:
        source: path, split, column names and normaliser.
        rows: of `read_source`; may have been taken.
    """
    files = rows.files if isinstance(rows, FileRows) else ()
    states: list[object] = [_version(f) if isinstance(f, RemoteFile) else _there(f) for f in files]
    if isinstance(rows, DatasetRows):
        states.append(_dataset_name(rows))
    normaliser = source.normaliser or ""
    return [*states, function_hash(normaliser) if names_function(normaliser) else ""]


def _names(rows: Rows) -> list[str]:
    """As messages show them; a renamed file is another row's place."""
    return [file.name for file in rows.files] if isinstance(rows, FileRows) else [""]


def _dataset_name(rows: DatasetRows) -> str:
    dataset = rows.dataset
    places = [Path(file["filename"]) for file in getattr(dataset, "cache_files", ())]
    states = [_state(place) for place in places if place.is_file()]
    return json.dumps([dataset._fingerprint, len(dataset), states])


def _content(file: Path | RemoteFile, known: Path) -> str:
    if isinstance(file, RemoteFile):
        return _version(file)
    state = _state(file)
    place = known / hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()
    with suppress(OSError, ValueError):  # there is none, or it is damaged
        digest, seal = place.read_text(encoding="ascii").split()
        if seal == _seal(place.name, digest):
            with suppress(OSError):
                os.utime(place)  # it was used
            return digest
    content = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            content.update(block)
    digest = content.hexdigest()
    if _state(file) == state:  # else it is being written to
        with suppress(OSError):  # who keeps the records will tell why it cannot
            known.mkdir(parents=True, exist_ok=True)
            temporary = place.with_suffix(f".{os.getpid()}")
            temporary.write_text(f"{digest} {_seal(place.name, digest)}", encoding="ascii")
            temporary.replace(place)
    return digest


def _version(file: RemoteFile) -> str:
    """Its properties there: size, time of change, and the store's own checksum where it has one."""
    name: Callable[[str], str] | None = getattr(file.files, "ukey", None)
    try:
        return name(file.path) if name else ""
    except Exception:  # each file system has its own
        return ""


def _seal(name: str, digest: str) -> str:
    """A damaged digest would find the records of another file."""
    return hashlib.blake2b(f"{name} {digest}".encode(), digest_size=8).hexdigest()


def _state(file: Path) -> Sequence[str | int]:
    """What changes whenever a file is written, or another takes its place."""
    found = file.stat()
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return [str(file.absolute()), found.st_size, *times, found.st_ino, found.st_dev]


def _there(file: Path) -> Sequence[str | int]:
    try:
        return _state(file)
    except OSError:  # it is gone
        return ()


def _size(file: Path | RemoteFile) -> int:
    if isinstance(file, Path):
        return file.stat().st_size
    try:
        return int(file.files.size(file.path) or 0)
    except Exception:  # each file system has its own
        return 0
