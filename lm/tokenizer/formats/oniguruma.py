"""Regular expressions of Oniguruma, which Hugging Face's ``tokenizers`` uses, from and to those of ``regex``.

The two agree on most of what pretoken patterns use. The differences that are translated:

    =====================  ===================  ====================================
    Oniguruma (Ruby)       ``regex``            matches
    =====================  ===================  ====================================
    ``^``, ``$``           ``(?m:^)``, ``(?m:$)``  at the start and end of each line
    ``\\A``, ``\\Z``         ``^``, ``$``         at the start and end of the text
    ``\\z``                 ``\\Z``               at the very end of the text
    ``(?>x{1,3})``         ``x{1,3}+``          without backtracking (possessive)
    ``(?:x{1,3})+``        the same             Oniguruma writes it ``x{1,3}+`` too
    ``(?m)``               ``(?s)``             a dot matches line breaks
    =====================  ===================  ====================================

Source: Oniguruma's ``doc/RE`` (syntax of Ruby).
"""

from collections.abc import Callable

import regex

from lm.common.errors import UserError

# One item of a pattern. A class is one item: it has no quantifiers inside.
_ITEM = regex.compile(
    r"(?P<line>\(\?m:[$^]\))|(?P<class>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|(?P<flags>\(\?[a-zA-Z-]+\))"
    r"|(?P<open>\((?:\?(?:[:>=!|]|<[=!]|[a-zA-Z-]*:))?)|(?P<close>\))|(?P<repeat>\{\d*,?\d*\}|[*+?])"
    r"|(?P<escape>\\[pP]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.)|(?P<other>.)",
    regex.DOTALL,
)
_OTHER_ESCAPE = regex.compile(r"\\(?!x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pPdDwWsSbBrntfva])[0-9A-Za-z]")
_OTHER_SET = regex.compile(r"(?<!\\)(?:\\\\)*\[(?!:)|&&|\\[bB]")  # a nested class, an intersection, a backspace
_ESCAPES_FROM = {r"\A": "^", r"\Z": "$", r"\z": r"\Z", "^": "(?m:^)", "$": "(?m:$)"}
_ESCAPES_TO = {r"\Z": r"\z", "^": r"\A", "$": r"\Z", "(?m:^)": "^", "(?m:$)": "$"}


def from_oniguruma(pattern: str) -> str:
    """Return the pattern in the syntax of ``regex``. Raises UserError, by name, for what has no translation here."""

    def translate(kind: str, item: str) -> str:
        if kind == "class":
            is_supported = not (_OTHER_SET.search(item[1:-1]) or _OTHER_ESCAPE.search(item))
        elif kind in ("flags", "open") and (flags := regex.fullmatch(r"\(\?([a-zA-Z-]+)([:)])", item)):
            # Flags in the middle of a pattern hold for different parts of it in the two syntaxes.
            is_supported = set(flags[1]) <= set("im-") and (kind == "open" or pattern.startswith(item))
            item = f"(?{flags[1].replace('m', 's')}{flags[2]}"
        else:
            is_supported = item in _ESCAPES_FROM or kind != "escape" or not _OTHER_ESCAPE.match(item)
            item = _ESCAPES_FROM.get(item, item)
        if not is_supported:
            raise UserError(f"{item!r} of the pretoken pattern {pattern!r} is not supported.")
        return item

    return _translate(pattern, translate, "(?:", ")+")


def to_oniguruma(pattern: str) -> str:
    """Return a pattern of ``regex`` in the syntax of Oniguruma. What the two write differently beyond the table of this
    module stays as it is. Raises UserError for the flag ``m``, except around a single ``^`` or ``$``."""

    def translate(kind: str, item: str) -> str:
        if kind in ("flags", "open") and (flags := regex.fullmatch(r"\(\?([a-z-]+)([:)])", item)):
            if "m" in flags[1]:
                raise UserError(
                    f"{item!r} of the pretoken pattern {pattern!r} cannot be exported: write (?m:^) and (?m:$) for the "
                    "start and end of a line."
                )
            return f"(?{flags[1].replace('s', 'm')}{flags[2]}"
        return _ESCAPES_TO.get(item, item)

    return _translate(pattern, translate, "(?>", ")")


def _translate(pattern: str, translate: Callable[[str, str], str], before: str, after: str) -> str:
    """Translate each item of a pattern, and put ``x{1,3}+`` between ``before`` and ``after`` without its plus sign."""
    items: list[str] = []
    opened: list[int] = []  # indices in ``items`` of the groups that are open
    atom = repeat = -1  # index of the last atom; of its interval, if that is the last item
    for match in _ITEM.finditer(pattern):
        kind, item = str(match.lastgroup), match.group()
        if kind == "repeat":
            if item == "+" and repeat >= 0:
                items[atom] = before + items[atom]
                items.append(after)
                repeat = -1
                continue
            repeat = len(items) if item.startswith("{") and len(item) > 2 else -1
        else:
            repeat = -1
            if kind == "open":
                opened.append(len(items))
            else:
                atom = opened.pop() if kind == "close" and opened else len(items)
        items.append(translate(kind, item))
    return "".join(items)
