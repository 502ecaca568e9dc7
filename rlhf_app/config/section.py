"""What every settings group is built from: the base class and the type of paths."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from rlhf_app.home import expanded


class Section(BaseModel):
    """Base of all settings groups: immutable, unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, on Linux


def clean_path(value: object) -> object:
    """Refuse what no file can be called, and expand `~` as a shell does in flags."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("expected a path or name, not an empty one")
        if "\0" in value:
            raise ValueError("expected a path or name without a null character")
        if not value.isascii() and value.encode("utf-8", "replace") != value.encode(
            "utf-8", "surrogatepass"
        ):
            raise ValueError("expected a name in UTF-8; rename the file")
        if "://" not in value and (
            len(value.encode(errors="replace")) > _LONGEST_PATH
            or any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in value.split("/"))
        ):
            raise ValueError("too long for the name of a file")
    if isinstance(value, str) and value.startswith("~"):
        place = expanded(value)
        if str(place).startswith("~") and not place.exists():
            raise ValueError(f"no home directory is known for {place.parts[0]}")
        return str(place)
    return value


Location = Annotated[str, BeforeValidator(clean_path)]
