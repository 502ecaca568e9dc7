"""Makes sure that the code about to run is ours.

`stages` and `data_sources` are plain names that other distributions, or a folder in the
current directory, can own too. Importing the wrong one would fail far away and obscurely.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import rlhf_app
from rlhf_app.errors import ConfigError

_COMPANIONS = ("stages", "data_sources")
OWN_PACKAGES = ("rlhf_app", *_COMPANIONS)


def check_origins() -> None:
    """Check that the companion packages lie beside `rlhf_app`, without importing them.

    Raises:
        ConfigError: one is missing, or Python finds another package of that name first.
    """
    home = Path(rlhf_app.__file__).resolve().parent.parent
    for name in _COMPANIONS:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        if not places:
            raise ConfigError(f"the package {name} is missing beside {home}; install rlhf again")
        found = Path(places[0]).resolve()
        if found != home / name:
            raise ConfigError(
                f"{found} hides our package {name}: uninstall the distribution that owns it, or "
                f"run from a directory without a folder {name}"
            )
