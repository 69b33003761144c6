"""Values of settings, perhaps text from a flag, converted to the annotated type of their field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from loongforge.errors import ConfigError


def convert(value: object, hint: object, name: str) -> object:
    """Convert ``value`` (perhaps text from a flag) to the annotated type, or raise ConfigError."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in options:
            return value
        msg = f"{name} is {value!r}: allowed are {', '.join(map(str, options))}"
        raise ConfigError(msg)
    if origin in {Union, UnionType}:
        return _convert_union(value, options, name)
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in {"true", "on", "yes", "1", "false", "off", "no", "0"}:
            return value.lower() in {"true", "on", "yes", "1"}
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lstrip("+-").isdigit():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif hint is str:
        if isinstance(value, (str, Path)):
            return str(value)
    elif origin is tuple:
        if isinstance(value, str):
            return tuple(part for part in value.split(",") if part)
        if isinstance(value, (list, tuple)):
            return tuple(str(part) for part in value)
    elif isinstance(value, Mapping):
        return dict(value)
    wanted = getattr(hint, "__name__", str(hint))
    msg = f"{name} is {value!r}: allowed is a value of type {wanted}"
    raise ConfigError(msg)


def _convert_union(value: object, options: tuple[object, ...], name: str) -> object:
    if type(None) in options and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    allowed: list[str] = []
    for option in options:
        if option is type(None):
            continue
        try:
            return convert(value, option, name)
        except ConfigError as error:
            allowed.append(str(error).rsplit("allowed", 1)[-1].strip())
    msg = f"{name} is {value!r}: allowed {'; or '.join(allowed)}"
    raise ConfigError(msg)
