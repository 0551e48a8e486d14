"""The axes of a sweep, the points that they span, and the expressions for derived options.

An expression such as ``2 * train.batch_size`` is arithmetic and runs no other code.
"""

import ast
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from lm.common.config import PYDANTIC_CONFIG
from lm.common.errors import UserError, did_you_mean

Settings = dict[str, Any]  # value by option, as train.max_lr, or by variable, which has no dot

_MAX_POINTS = 10_000
_MAX_NUMBER = 1e300
MODEL_COSTS = ("parameters", "flops_per_token")  # of the model of a point, for expressions


@dataclass(frozen=True)
class Axis:
    """One direction of a sweep: the values of an option or variable, a range of them, or cases of several options.

    A name with a dot is an option of the pipeline, such as ``train.max_lr``. A name without a dot is a variable, for
    expressions and for the table.
    """

    __pydantic_config__ = PYDANTIC_CONFIG

    option: str = ""
    """Option or variable that varies. Empty with ``cases``."""
    values: list[Any] = field(default_factory=list)
    """Its values. Empty with ``low`` and ``high``."""
    low: int | float | None = None
    """Lowest value of a range. If both ends are whole numbers, so are the values between."""
    high: int | float | None = None
    """Highest value of a range."""
    num_values: int | None = None
    """Number of values of the range, with both ends. Without it, a search picks any value of the range."""
    scale: Literal["log", "linear"] = "log"
    """How the values of a range are spaced."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Options that vary together: each case has the values of one or more options and variables."""

    def __post_init__(self) -> None:
        has_range, (low, high) = self.low is not None and self.high is not None, self._ends
        rule = ""
        if bool(self.cases) == bool(self.option) or (self.cases and (self.values or has_range)):
            rule = "either cases, or an option with values or a range"
        elif (self.cases or self.values) and (self.low, self.high, self.num_values) != (None, None, None):
            rule = "low, high and num_values only for a range"
        if rule:
            given = {name: getattr(self, name) for name in ("option", "values", "low", "high", "cases")}
            given = {name: value for name, value in given.items() if value not in ("", [], None)}
            raise UserError(f"An axis has {rule}; not {json.dumps(given, default=str)}.")
        if self.cases and not self.names:
            raise UserError("An axis has cases that set no option.")
        named = [(self.option, value) for value in self.values]
        named += [item for case in self.cases for item in case.items()]
        for name, value in named:
            try:  # the table and the keys have the value
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise UserError(
                    f"The axis {name} has the value {value!r}; it may have text, finite numbers, true, false, null, "
                    "and lists and mappings of these. A date needs quotes."
                ) from None
        if self.option and bool(self.values) == has_range:
            raise UserError(f"The axis {self.option} needs either values, or low and high.")
        if has_range and not low < high:
            raise UserError(f"The axis {self.option} has low {self.low} and high {self.high}; low must be below high.")
        if has_range and max(abs(low), abs(high)) > _MAX_NUMBER:
            raise UserError(f"The axis {self.option} has an end beyond ±{_MAX_NUMBER:g}.")
        if self.num_values is not None and not 2 <= self.num_values <= _MAX_POINTS:
            raise UserError(f"The axis {self.option} has {self.num_values} values; a range has 2 to {_MAX_POINTS:,}.")
        if has_range and self.scale == "log" and low <= 0:
            raise UserError(f"The axis {self.option} has low {self.low}; a log scale needs a number above 0.")

    @property
    def _ends(self) -> tuple[float, float]:
        return (0.0 if self.low is None else self.low), (0.0 if self.high is None else self.high)

    @property
    def is_whole(self) -> bool:
        """Whether the values of the range are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def names(self) -> list[str]:
        """Options and variables that the axis sets."""
        return list(dict.fromkeys(name for case in self.cases for name in case)) if self.cases else [self.option]

    def choices(self) -> list[Settings]:
        """Return the settings of each position on the axis. Raises UserError for a range without ``num_values``."""
        if self.cases:
            return [read_numbers(case) for case in self.cases]
        if self.values:
            return [{self.option: read_numbers(value)} for value in self.values]
        if self.num_values is None:
            raise UserError(f"The axis {self.option} has a range without num_values; set it, or add a search.")
        steps = [index / (self.num_values - 1) for index in range(self.num_values)]
        return [{self.option: value} for value in dict.fromkeys(map(self.at, steps))]

    def at(self, fraction: float) -> int | float:
        """Return the value at a fraction of the range, 0 for ``low`` and 1 for ``high``; six digits."""
        low, high = self._ends
        if self.scale == "log":
            value = math.exp((1 - fraction) * math.log(low) + fraction * math.log(high))
        else:
            value = (1 - fraction) * low + fraction * high
        return round(value) if self.is_whole else float(f"{value:.6g}")

    def ends(self) -> list[Settings]:
        """Return all choices, or the ends of a range without ``num_values``: a search stays between them."""
        is_open = not self.cases and not self.values and self.num_values is None
        return [{self.option: self.at(0)}, {self.option: self.at(1)}] if is_open else self.choices()


def read_numbers(value: Any) -> Any:
    """Return ``value`` with numbers for texts such as "1e-3": YAML 1.1 has exponents with a decimal point only."""
    if isinstance(value, list):
        return [read_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: read_numbers(item) for name, item in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def expand(axes: Sequence[Axis]) -> list[Settings]:
    """Return the settings of all points: each choice of each axis with each of the others, the last axis fastest.

    Raises UserError if an option is on two axes, or for more than 10,000 points.
    """
    return _product(axes, [axis.choices() for axis in axes])


def corners(axes: Sequence[Axis]) -> list[Settings]:
    """Return points at the ends of each axis of a search, with the first choice of the others."""
    ends = [axis.ends() for axis in axes]
    first = {name: value for choices in ends for name, value in choices[0].items()}
    _product(axes, [choices[:1] for choices in ends])
    return [first, *(first | choice for choices in ends for choice in choices[1:])]


def _product(axes: Sequence[Axis], choices: list[list[Settings]]) -> list[Settings]:
    names = [name for axis in axes for name in axis.names]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{repeated[0]} is on two axes; couple its values as cases of one axis.")
    if (count := math.prod(map(len, choices))) > _MAX_POINTS:
        raise UserError(f"The axes span {count:,} points; the most is {_MAX_POINTS:,}.")
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices)]


@dataclass(frozen=True)
class Point:
    """A point of a sweep."""

    settings: Settings
    """Values of the options and variables of the axes, and of the derived options."""
    config: dict[str, Any]
    """Configuration of the pipeline, by section and field."""

    @property
    def title(self) -> str:
        """The settings in one line."""
        return describe_settings(self.settings)


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Return settings in one line, such as ``train.max_lr 0.01, train.steps 300``."""
    texts = (f"{name} {f'{value:.6g}' if isinstance(value, float) else value}" for name, value in settings.items())
    return ", ".join(texts) or "the base"


def make_point(base: Mapping[str, Any], settings: Settings, derive: Mapping[str, Any]) -> Point:
    """Return the point with these settings of the axes. ``base`` is the configuration without them.

    ``derive`` has an expression for each derived option or variable; see
    :func:`evaluate_expression`. An expression may use other derived ones, in any order, and
    ``parameters`` and ``flops_per_token`` of the point's model. Raises UserError for an unknown option, an expression
    without a value, or two that need each other.
    """
    config = {name: deepcopy(value) for name, value in base.items()}
    variables: Settings = {}
    for name, value in settings.items():
        _set(config, variables, name, value)
    derived: Settings = dict.fromkeys(derive)
    for name in _order(derive):
        if name in settings:
            raise UserError(f"{name} is derived and is on an axis too; leave one of them out.")
        sections = {section: fields for section, fields in config.items() if isinstance(fields, dict)}
        options = {f"{section}.{key}": value for section, fields in sections.items() for key, value in fields.items()}
        values = options | variables
        expression = str(derive[name])
        if find_names(expression).intersection(MODEL_COSTS):
            values |= _model_costs(config)
        derived[name] = evaluate_expression(expression, values)
        _set(config, variables, name, derived[name])
    return Point({**settings, **derived}, config)


def _order(derive: Mapping[str, Any]) -> list[str]:
    """Return the derived names so that each follows those that its expression needs.

    The order of ``derive`` does not count: a database may not keep that of a flow's parameters.
    """
    needs = {}
    for name, expression in derive.items():
        needs[name] = find_names(str(expression)) & derive.keys()
        if find_names(str(expression)).intersection(MODEL_COSTS):
            needs[name] |= {other for other in derive if other.startswith("model.") or other == "tokenizer.vocab_size"}
        needs[name].discard(name)  # the value of the base
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise UserError(f"{' and '.join(error.args[1][:2])} are derived from each other; give one a value.") from None


def _set(config: dict[str, Any], variables: Settings, name: str, value: Any) -> None:
    if "." not in name and name not in config:
        variables[name] = value
        return
    if name.startswith(("execution.", "sample.", "name")):
        raise UserError(f"{name} has no effect on results and cannot vary; set it for the whole sweep.")
    if "." not in name:
        raise UserError(f"{name} is a part of the configuration; give the variable another name.")
    set_option(config, name, value)


def set_option(config: dict[str, Any], name: str, value: Any) -> None:
    """Set an option such as ``train.steps``, or ``data.mix.NAME.weight``, in a configuration of sections. Raises
    UserError if there is none."""
    fields, option = _find_fields(config, name)
    fields[option] = value


def get_option(config: dict[str, Any], name: str) -> Any:
    """Return the value of an option; see :func:`set_option`."""
    fields, option = _find_fields(config, name)
    return fields[option]


def _find_fields(config: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the fields in which an option lies, and its name there."""
    *path, option = name.split(".")
    fields: Any = config
    for part in path:
        fields = fields.get(part) if isinstance(fields, dict) else None
    if not path or not isinstance(fields, dict) or option not in fields:
        known = [f"{part}.{key}" for part, fields in config.items() if isinstance(fields, dict) for key in fields]
        raise UserError(f"There is no option {name}{did_you_mean(name, known)}.")
    return fields, option


def _model_costs(config: Mapping[str, Any]) -> Settings:
    from lm.model.config import ModelConfig
    from lm.model.flops import flops_per_token, parameter_count

    fields = config["model"] | {"vocab_size": config["model"]["vocab_size"] or config["tokenizer"]["vocab_size"]}
    for name, value in fields.items():
        if isinstance(value, float) and value.is_integer():  # YAML has numbers such as 5.12e+2 as floats
            fields[name] = int(value)
    try:
        model = ModelConfig(**fields)
    except TypeError as error:  # such as an unknown field of model.moe
        raise UserError(f"The model is not valid: {error}.") from None
    return {"parameters": parameter_count(model)["total"], "flops_per_token": flops_per_token(model)}


_MAX_CHARACTERS = 500
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # of floats: a large power is an error, not a number of a million digits
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _round(*values: Any) -> int:
    if len(values) != 1:
        raise UserError("round takes one number, and returns a whole number")
    return round(values[0])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log2": math.log2,
}


def evaluate_expression(expression: str, values: Mapping[str, Any]) -> int | float:
    """Return the value of an expression; whole numbers are ints.

    It has numbers, the names in ``values`` (with dots, as ``train.steps``), ``+ - * / // % **``, parentheses, and the
    functions min, max, round, floor, ceil, sqrt and log2. Raises UserError for anything else, for an unknown name, for
    a name whose value is no number, and if the result is not finite.
    """
    try:
        if len(expression) > _MAX_CHARACTERS:
            raise UserError(f"it is longer than {_MAX_CHARACTERS} characters")
        result = _evaluate(ast.parse(expression.strip(), mode="eval").body, values)
        if not math.isfinite(result):
            raise UserError(f"its value is {result}")
    except SyntaxError:
        raise UserError(f"The expression {expression!r} cannot be read.") from None
    except (ArithmeticError, UserError, TypeError, ValueError) as error:
        raise UserError(f"The expression {expression!r} has no value: {error}.") from None
    return int(result) if result == int(result) else float(result)


def find_names(expression: str) -> set[str]:
    """Return the options and variables that an expression reads; none if it cannot be read."""
    try:
        nodes = ast.walk(ast.parse(expression.strip(), mode="eval")) if len(expression) <= _MAX_CHARACTERS else ()
    except (SyntaxError, ValueError):
        return set()
    return {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}


def _evaluate(node: ast.AST, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            if name not in values:
                raise UserError(f"there is no option or variable {name}{did_you_mean(name, values)}")
            value = values[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UserError(f"{name} is {value!r}, not a number")
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(argument, values) for argument in arguments))
    raise UserError(f"{ast.unparse(node)} is not arithmetic; known functions: {', '.join(_FUNCTIONS)}")
