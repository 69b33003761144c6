"""Nested frozen dataclasses from plain mappings (TOML tables, flags) with errors that name the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loongforge.errors import ConfigError

T = TypeVar("T")


def updated(base: T, overrides: Mapping[str, object], *, where: str = "option") -> T:
    """Return a copy of the dataclass ``base`` with ``overrides`` applied.

    Args:
        base: A frozen dataclass, possibly holding other dataclasses.
        overrides: Values by field name; a mapping goes into the nested dataclass, and so does a dotted name
            (``{"image.short_edge": 84}``).
        where: Prefix of field names in errors.

    Raises:
        ConfigError: An unknown field or a value of another type than the field's.
    """
    hints = get_type_hints(type(base))
    known = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}  # type: ignore[arg-type]
    changes: dict[str, object] = {}
    for name, value in _undotted(overrides).items():
        if name not in known:
            msg = f"unknown {where} '{name}'; allowed are {', '.join(sorted(known))}"
            raise ConfigError(msg)
        current, label = known[name], f"{where}.{name}" if where != "option" else name
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            changes[name] = updated(current, value, where=label)
        else:
            changes[name] = coerce(value, hints[name], label)
    try:
        return dataclasses.replace(base, **changes)  # type: ignore[type-var]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _undotted(overrides: Mapping[str, object]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in overrides.items():
        head, dot, rest = name.partition(".")
        if not dot:
            result[name] = {**_mapping(result.get(name)), **value} if isinstance(value, Mapping) else value
        else:
            result[head] = {**_mapping(result.get(head)), rest: value}
    return result


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def coerce(value: object, hint: object, label: str) -> object:
    """Check ``value`` against a type hint; read strings where a flag gave one. Raises ConfigError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _coerce_union(value, arguments, label)
    if origin is Literal:
        if value in arguments:
            return value
        msg = f"{label} must be one of {', '.join(map(repr, arguments))}, got {value!r}"
        raise ConfigError(msg)
    if origin is tuple:
        return _coerce_tuple(value, arguments, label)
    if origin in (Mapping, dict) or hint in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
        msg = f"{label} must be a table, got {value!r}"
        raise ConfigError(msg)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _coerce_dataclass(value, hint, label)
    return _coerce_scalar(value, hint, label)


def _coerce_union(value: object, arguments: tuple[object, ...], label: str) -> object:
    if any(get_origin(argument) is Literal and value in get_args(argument) for argument in arguments):
        # A literal may be the word that otherwise stands for no value.
        return value
    if value is None or (isinstance(value, str) and value.lower() == "none" and type(None) in arguments):
        if type(None) in arguments:
            return None
        msg = f"{label} must not be empty"
        raise ConfigError(msg)
    error: ConfigError | None = None
    for argument in arguments:
        if argument is type(None):
            continue
        try:
            return coerce(value, argument, label)
        except ConfigError as raised:
            error = raised
    raise error or ConfigError(f"{label} cannot be {value!r}")


def _coerce_tuple(value: object, arguments: tuple[object, ...], label: str) -> object:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        msg = f"{label} must be a list, got {value!r}"
        raise ConfigError(msg)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(coerce(item, arguments[0], f"{label}[{i}]") for i, item in enumerate(items))
    if len(items) != len(arguments):
        msg = f"{label} must have {len(arguments)} values, got {len(items)}: {value!r}"
        raise ConfigError(msg)
    pairs = zip(items, arguments, strict=True)
    return tuple(coerce(item, argument, f"{label}[{i}]") for i, (item, argument) in enumerate(pairs))


def _coerce_dataclass(value: object, hint: type, label: str) -> object:
    if isinstance(value, hint):
        return value
    if not isinstance(value, Mapping):
        msg = f"{label} must be a table, got {value!r}"
        raise ConfigError(msg)
    hints = get_type_hints(hint)
    for name in value:
        if name not in hints:
            msg = f"unknown field '{name}' in {label}; allowed are {', '.join(sorted(hints))}"
            raise ConfigError(msg)
    try:
        return hint(**{name: coerce(item, hints[name], f"{label}.{name}") for name, item in value.items()})
    except TypeError as error:
        msg = f"{label}: {error}"
        raise ConfigError(msg) from error
    except ConfigError:
        raise
    except ValueError as error:
        msg = f"{label}: {error}"
        raise ConfigError(msg) from error


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _coerce_scalar(value: object, hint: object, label: str) -> object:
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        msg = f"{label} must be true or false, got {value!r}"
        raise ConfigError(msg)
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value) if isinstance(value, str | int | float) else None
        except ValueError:
            number = None
        if number is not None and (hint is float or number.is_integer()):
            return number if hint is float else int(number)
        msg = f"{label} must be a{'n integer' if hint is int else ' number'}, got {value!r}"
        raise ConfigError(msg)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    if hint is object:
        return value
    name = getattr(hint, "__name__", str(hint))
    msg = f"{label} must be of type {name}, got {value!r}"
    raise ConfigError(msg)
