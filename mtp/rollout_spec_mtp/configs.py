"""Frozen dataclasses from parsed YAML: unknown keys and values of the wrong kind are refused, with the key's full name."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def build(kind: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """``kind(**mapping)`` with nested dataclasses built likewise, lists turned into tuples and integers into floats where a float is meant.

    Raises ValueError that names ``where.key`` for unknown, missing and ill-typed keys. A class with ``from_mapping`` builds itself.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where} must be a mapping of settings, got {mapping!r}")
    own = getattr(kind, "from_mapping", None)
    if own is not None:
        made: T = own(mapping)
        return made
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(mapping) - set(fields))
    if unknown:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if _is_required(field) and name not in mapping]
    if missing:
        raise ValueError(f"{where} needs {', '.join(missing)}")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in mapping.items()})


def to_mapping(config: Any) -> Any:
    """The JSON-like form that ``build`` reads back."""
    if dataclasses.is_dataclass(config):
        return {field.name: to_mapping(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, tuple | list):
        return [to_mapping(item) for item in config]
    if isinstance(config, Mapping):
        return {key: to_mapping(value) for key, value in config.items()}
    return config


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _value(inner, value, where)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping or origin is dict or hint is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping, got {value!r}")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, where)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise ValueError(f"{where} must be a whole number, got {value!r}")
    if not isinstance(value, hint):
        raise ValueError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
