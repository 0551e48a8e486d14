"""What a configuration's fields allow, declared once at the field: our own check and Prefect's form both read it."""

import operator
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lm.errors import UserError

# A dataclass's __pydantic_config__, read by that name by pydantic and so by Prefect's form: the docstrings of the
# fields are their explanations there, and a misspelled field is refused.
FORM: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid"}

_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


def bounded(
    default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> Any:
    """A dataclass field with bounds: at least ``ge``, above ``gt``, at most ``le``, below ``lt``; nan is outside them.

    ``lt=math.inf`` asks for a finite number; a JSON schema, which has no infinity, leaves that out.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}  # pydantic's names, under which it looks here
    return field(default=default, metadata={name: bound for name, bound in bounds.items() if bound is not None})


def check_bounds(config: Any, section: str) -> None:
    """Raise UserError for a field of the dataclass ``config`` that is out of its bounds, or not of its type. None is
    fine where it is the default."""
    types = get_type_hints(type(config))
    for option in fields(config):
        value, kind = getattr(config, option.name), types[option.name]
        bounds = {name: bound for name, bound in option.metadata.items() if name in _BOUNDS}
        if value is None and option.default is None:
            continue
        if not _is_of(kind, value):
            fits, wanted = False, " or ".join(get_args(kind)) if get_origin(kind) is Literal else _name(kind)
        else:
            fits, wanted = all(_BOUNDS[name][0](value, bound) for name, bound in bounds.items()), _wanted(**bounds)
        if not fits:
            left_out = ", or left out" if option.default is None else ""
            raise UserError(f"{section}.{option.name} is {value!r}; it must be {wanted}{left_out}.")


def _is_of(kind: Any, value: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_is_of(inner[0], item) for item in value)
    if inner:  # a union
        return any(_is_of(one, value) for one in inner)
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))


def _name(kind: Any) -> str:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
    return f"of the type {name}"


def _wanted(**bounds: float) -> str:
    if bounds.keys() == {"ge", "le"}:
        return f"between {bounds['ge']} and {bounds['le']}"
    return " and ".join(f"{_BOUNDS[name][1]} {bound}" for name, bound in bounds.items())
