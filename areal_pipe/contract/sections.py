"""The base of all configuration sections: unknown keys are errors that name the nearest key."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from areal_pipe.contract.errors import ConfigError


class Section(BaseModel):
    """A section of a configuration file. Immutable; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_nearest_key(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    raise ValueError(
                        f"unknown key {key!r}{nearest(str(key), list(cls.model_fields))}"
                    )
        return value


def nearest(key: str, known: list[str]) -> str:
    """'; did you mean ...?', or the keys there are."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(sorted(known))}"


def describe_errors(error: Any, *, source: str) -> ConfigError:
    """A pydantic ValidationError as one message: where, what came, what is allowed."""
    lines = [f"{source} is not a valid configuration:"]
    for e in error.errors():
        where = ".".join(str(part) for part in e["loc"]) or "(top level)"
        got = e.get("input")
        shown = "" if isinstance(got, dict | list) or e["type"] == "missing" else f" (got {got!r})"
        lines.append(f"  {where}: {e['msg'].removeprefix('Value error, ')}{shown}")
    return ConfigError("\n".join(lines))
