"""Whether the Hugging Face Hub answers, asked once before anything is loaded from it.

Its client repeats each request five times with growing waits, and a model is a dozen requests:
without a network the first error came after 50 seconds, and behind a firewall that swallows
packets after many minutes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import cache

from rlhf_app.url_secrets import without_secrets

log = logging.getLogger(__name__)

# Of one attempt as a whole, the lookup of the name included.
PATIENCE_SECONDS = 10.0
_ATTEMPTS = 2


def use_cache_if_unreachable() -> None:
    """Go on from the local cache alone where the Hub does not answer, as HF_HUB_OFFLINE=1 does.

    What the cache lacks is an error at once. Waits `PATIENCE_SECONDS` twice at most, and only
    once in the life of the process.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        return
    log.warning(
        "the Hugging Face Hub at %s does not answer: only what is in the local cache can be used",
        without_secrets(constants.ENDPOINT),
    )
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by `datasets` when it is imported
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


@cache
def _answers(endpoint: str) -> bool:
    """Whether any answer comes, even one that refuses."""
    return any(_asked(endpoint) for _ in range(_ATTEMPTS))


def _asked(endpoint: str) -> bool:
    from huggingface_hub import get_session

    answered = threading.Event()
    ended = threading.Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=PATIENCE_SECONDS)
            answered.set()
        except Exception as error:
            log.info("%s: %s", without_secrets(endpoint), without_secrets(str(error)))
        finally:
            ended.set()

    # The client's timeout does not hold for the lookup of a name: the thread is left behind.
    threading.Thread(target=ask, daemon=True, name="hub").start()
    ended.wait(PATIENCE_SECONDS)
    return answered.is_set()
