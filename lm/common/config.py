"""Configuration fields with bounds. The constructor's check and Prefect's form both read the same declaration.

The check is not pydantic's: each start of the command line would import pydantic, and its messages do not name the fix.
"""

import operator
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from lm.common.errors import UserError

# Each config dataclass has this as ``__pydantic_config__``. Prefect builds its form with pydantic, which then takes
# the docstring under a field as the field's description and refuses unknown fields.
PYDANTIC_CONFIG: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid"}

_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


def bounded_field(
    default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> Any:
    """Declare a dataclass field with a default and bounds: ``>= ge``, ``> gt``, ``<= le``, ``< lt``. Excludes nan.

    ``lt=math.inf`` requires a finite number. JSON Schema has no infinity and omits that bound.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}  # pydantic reads the metadata under these names
    return field(default=default, metadata={name: bound for name, bound in bounds.items() if bound is not None})


@dataclass(frozen=True)  # jsonargparse makes options of the fields only if each base is a dataclass
class Config:
    """Base of a dataclass of settings, whose constructor checks the fields. ``section``: their prefix in messages."""

    __pydantic_config__ = PYDANTIC_CONFIG
    _section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        cls._section = section or cls._section

    def __post_init__(self) -> None:
        validate_fields(self, self._section)


def validate_fields(config: Any, section: str) -> None:
    """Raise UserError if a field of the dataclass ``config`` has the wrong type or is out of bounds.

    None is accepted for a field whose default is None, or whose type has None. ``section`` is the prefix of field names
    in messages.
    """
    types = get_type_hints(type(config))
    for option in fields(config):
        value, expected_type = getattr(config, option.name), types[option.name]
        is_optional = option.default is None or type(None) in get_args(expected_type)
        if value is None and is_optional:
            continue
        bounds = {name: bound for name, bound in option.metadata.items() if name in _BOUNDS}
        if not _has_type(value, expected_type):
            requirement = _describe_type(expected_type)
        elif not all(_BOUNDS[name][0](value, bound) for name, bound in bounds.items()):
            requirement = _describe_bounds(bounds)
        else:
            continue
        hint = ", or left out" if is_optional else ""
        raise UserError(f"{section}.{option.name} is {value!r}; it must be {requirement}{hint}.")


def _has_type(value: Any, expected_type: Any) -> bool:
    origin, arguments = get_origin(expected_type), get_args(expected_type)
    if expected_type is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, arguments[1]) for item in value.values())
    if arguments:  # a union
        return any(_has_type(value, member) for member in arguments)
    # numpy's numbers count too
    return isinstance(value, {int: Integral, float: Real}.get(expected_type, expected_type))


def _describe_type(expected_type: Any) -> str:
    if get_origin(expected_type) is Literal:
        *others, last = get_args(expected_type)
        return f"{', '.join(others)} or {last}" if others else last
    is_class = isinstance(expected_type, type) and not get_args(expected_type)
    return f"of the type {expected_type.__name__ if is_class else str(expected_type).replace('typing.', '')}"


def _describe_bounds(bounds: dict[str, float]) -> str:
    if bounds.keys() == {"ge", "le"}:
        return f"between {bounds['ge']} and {bounds['le']}"
    return " and ".join(f"{_BOUNDS[name][1]} {bound}" for name, bound in bounds.items())
