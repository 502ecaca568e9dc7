"""Files at http and https addresses; fsspec would need further packages for them."""

from __future__ import annotations

import base64
import http.client
import shutil
import tempfile
import urllib.request
from typing import IO, cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_TIMEOUT = 60.0
# What an address may hold as it is; the rest, spaces for example, is escaped.
_SAFE = "%/:=&?~#+!$,;'@()*[]"


class WebFiles:
    """Looks like a file system of fsspec as far as `RemoteFile` needs one."""

    def open(self, address: str, mode: str) -> IO[bytes]:
        """Fetches a file to a temporary one, which is seekable and known to be whole.

        Args:
            address: with `user:password@` for basic authorisation.
            mode: "rb".

        Raises:
            OSError: it cannot be fetched, or the transfer breaks off.
        """
        parts = urlsplit(address)
        login, _, host = parts.netloc.rpartition("@")
        bare = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        request = urllib.request.Request(  # noqa: S310 - the caller lets only http(s) through
            quote(bare, safe=_SAFE), headers={"User-Agent": "rlhf"}
        )
        if login:
            token = base64.b64encode(unquote(login).encode()).decode()
            # Not for whoever the request is sent on to.
            request.add_unredirected_header("Authorization", f"Basic {token}")
        file = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115
        try:
            opening = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310 - as above
            with opening as answer:
                shutil.copyfileobj(answer, file)
                expected = answer.headers.get("Content-Length")
            if expected is not None and file.tell() != int(expected):
                raise OSError(f"the transfer broke off at {file.tell()} of {expected} bytes")
        except http.client.HTTPException as error:
            file.close()
            raise OSError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return cast(IO[bytes], file)
