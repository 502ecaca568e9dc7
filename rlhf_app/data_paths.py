"""What the path of a data source can be, and whether its content is still the same."""

from __future__ import annotations

import glob
import hashlib
import re
from pathlib import Path

from rlhf_app.fingerprint import content_hash, file_hash
from rlhf_app.home import expanded
from rlhf_app.url_secrets import without_secrets

# s3://..., https://..., memory://..., and chains such as zip://*.csv::https://...
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_WILDCARD = re.compile(r"[*?[]")


def is_url(path: str) -> bool:
    """Returns whether a path is an address that fsspec opens."""
    return _URL.match(path) is not None


def has_wildcards(path: str) -> bool:
    """Returns whether a path is a pattern such as data/*.jsonl, and no file of that very name."""
    return not is_url(path) and _WILDCARD.search(path) is not None and not expanded(path).exists()


def matching_files(pattern: str) -> list[Path]:
    """Returns the files that match a pattern (`**` for any depth), in order."""
    found = glob.glob(str(expanded(pattern)), recursive=True)
    return sorted(path for path in map(Path, found) if path.is_file())


def fixed_part(pattern: str) -> Path:
    """Returns the directory above the first part with a wildcard."""
    parts = expanded(pattern).parts
    first = next(i for i, part in enumerate(parts) if _WILDCARD.search(part))
    return Path(*parts[:first])


def no_weight(path: str) -> str:
    """Returns a remark where a name that is not there ends in = and a weight that is none."""
    before, equals, weight = path.rpartition("=")
    if not equals or not (expanded(before).exists() or matching_files(before)):
        return ""
    return f", and {weight!r} is no weight for {before} (a number, as in {before}=2)"


def source_hash(path: str) -> str:
    """Returns the hash of a source's content; a Hub id or an address stands for itself."""
    if is_url(path):
        return f"hub:{without_secrets(path)}"
    if not has_wildcards(path):
        return content_hash(path)
    digest = hashlib.sha256()
    for file in matching_files(path):
        name = file.relative_to(fixed_part(path)).as_posix()
        digest.update(f"{name}\0{file_hash(file)}\0".encode())
    return digest.hexdigest()
