"""A foreign package of our companions' names is refused by its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_app.errors import ConfigError
from rlhf_app.origins import check_origins


def test_our_own_packages_pass() -> None:
    check_origins()


@pytest.mark.parametrize("name", ["stages", "data_sources"])
def test_an_intruder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path / name} hides our package {name}"):
        check_origins()
