"""Files at addresses such as s3://bucket/data/*.jsonl, through fsspec, and on the web.

Credentials and endpoints come from where the file system looks for them: its environment
variables, its own files, or fsspec's configuration (~/.config/fsspec).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, cast
from urllib.parse import urlsplit

from data_sources.web import WebFiles
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

_WEB = ("http://", "https://")
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file; printed without the secrets of its address.

    Attributes:
        files: the fsspec file system, or `WebFiles`.
        path: the file's path in it.
        address: the file as it is shown.
    """

    files: Any
    path: str
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """Its last part, which tells the format."""
        path = urlsplit(self.path).path if self.path.startswith(_WEB) else self.path
        return PurePosixPath(path).name

    def open(self, mode: str) -> IO[bytes]:
        """Opens the file.

        Raises:
            OSError: it cannot be opened.
        """
        try:
            return cast(IO[bytes], self.files.open(self.path, mode))
        except OSError:
            raise
        except Exception as error:  # each file system has its own
            raise OSError(_first_line(error)) from error


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """What an address stands for.

    Attributes:
        files: path below the directory or pattern -> file, in order.
        is_file: the address names one file.
        is_saved: it is a directory of `save_to_disk`.
    """

    files: dict[PurePosixPath, RemoteFile]
    is_file: bool = False
    is_saved: bool = False


def remote_files(url: str) -> RemoteFiles:
    """Looks an address up.

    Raises:
        ConfigError: unknown kind of address, a package for it is missing, or it does not answer.
    """
    import fsspec

    shown = without_secrets(url)
    if url.startswith(_WEB):  # no directories, and ? is part of the address
        file = RemoteFile(WebFiles(), url, shown)
        return RemoteFiles({PurePosixPath(file.name): file}, is_file=True)
    try:
        fs, path = fsspec.core.url_to_fs(url)
        if re.search(r"[*?[]", path):
            found, base = fs.glob(path), re.split(r"[*?[]", path)[0].rpartition("/")[0]
            found = [each for each in found if not fs.isdir(each)]
        elif fs.isdir(path):
            found, base = fs.find(path), path
        else:
            return RemoteFiles({PurePosixPath(path): RemoteFile(fs, path, shown)}, is_file=True)
    except ImportError as error:
        package = _PACKAGES.get(url.partition("://")[0].rpartition("::")[2].lower())
        fix = f"pip install {package}" if package else _first_line(error)
        raise ConfigError(
            f"data source {shown}: addresses of this kind need another package: {fix}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"data source {shown} cannot be reached ({_first_line(error)})"
        ) from error
    files = {
        PurePosixPath(each[len(base) :].lstrip("/")): RemoteFile(
            fs, each, fs.unstrip_protocol(each)
        )
        for each in sorted(found)
    }
    markers = {PurePosixPath("dataset_dict.json"), PurePosixPath("state.json")}
    return RemoteFiles(files, is_saved=bool(markers & files.keys()))


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return without_secrets(f"{type(error).__name__}: {first}")
