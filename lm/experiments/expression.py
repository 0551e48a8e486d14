"""Arithmetic expressions for derived options, such as ``2 * train.batch_size``. They run no other code."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from lm.common.errors import UserError, did_you_mean

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
            return _look_up(ast.unparse(node), values)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(argument, values) for argument in arguments))
    raise UserError(f"{ast.unparse(node)} is not arithmetic; known functions: {', '.join(_FUNCTIONS)}")


def _look_up(name: str, values: Mapping[str, Any]) -> int | float:
    if name not in values:
        raise UserError(f"there is no option or variable {name}{did_you_mean(name, values)}")
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name} is {value!r}, not a number")
    return value
