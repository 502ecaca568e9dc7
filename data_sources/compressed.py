"""Opening data files, compressed with gzip, Zstandard or not at all."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from data_sources.remote import RemoteFile
from rlhf_app.errors import ConfigError

_SUFFIXES = (".gz", ".zst")
_BLOCK = 2**16
_BUFFER = 2**20


def plain_name(name: str) -> str:
    """Returns a file's name in lower case and without .gz or .zst."""
    name = name.lower()
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


def is_compressed(name: str) -> bool:
    """Returns whether a file of that name is decompressed as it is read."""
    return name.lower().endswith(_SUFFIXES)


def opened(file: Path | RemoteFile) -> IO[bytes]:
    """Opens a file for reading, decompressed.

    Raises:
        ConfigError: .zst, and nothing here can read it.
        OSError: the file cannot be opened. Damage shows as OSError or EOFError when it is read.
    """
    name = file.name.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(file.open("rb"), "rb"))
    if name.endswith(".zst"):
        return cast(IO[bytes], io.BufferedReader(_Zstandard(file), _BUFFER))
    return file.open("rb")


class _Zstandard(io.RawIOBase):
    """Frames of Zstandard one after another; a cut one is an error, not the end."""

    def __init__(self, file: Path | RemoteFile) -> None:
        self._new, self._error = _decoder(str(file))
        self._source = file.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._source.read(_BLOCK)
            if not block:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("Zstandard data ends in the middle of a frame")
                return 0
            self._ready = memoryview(self._decompressed(block))
        number = min(len(buffer), len(self._ready))
        buffer[:number] = self._ready[:number]
        self._ready = self._ready[number:]
        return number

    def _decompressed(self, block: bytes) -> bytes:
        pieces = []
        while block:
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            try:
                pieces.append(self._frame.decompress(block))
            except self._error as error:
                raise OSError(f"damaged Zstandard data ({error})") from error
            block = self._frame.unused_data if self._frame.eof else b""
        return b"".join(pieces)


def _decoder(name: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Returns what makes a decoder of one frame, and its error: of Python 3.14, or zstandard."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            import zstandard
        except ImportError:
            raise ConfigError(
                f"{name}: reading .zst needs the package zstandard (pip install 'rlhf[zst]') or "
                "Python 3.14"
            ) from None
        return (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError
    return zstd.ZstdDecompressor, zstd.ZstdError
