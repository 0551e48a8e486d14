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
    ``\\u00E9``             ``\\xE9``             the character; ``\\xE9`` is a byte in Oniguruma
    =====================  ===================  ====================================

``\\w``, ``\\W``, ``\\b``, ``\\B`` and some classes like ``[[:digit:]]`` have the same name in both and match different
characters. They are translated to a class that names its characters.

Sources: Oniguruma's ``doc/RE`` (syntax of Ruby); the characters of each class, compared over all of Unicode.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import regex

from lm.common.errors import UserError

# One item of a pattern. A class is one item: it has no quantifiers inside.
_ITEM = regex.compile(
    r"(?P<line>\(\?m:[$^]\))|(?P<class>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|(?P<flags>\(\?[a-zA-Z-]+\))"
    r"|(?P<open>\((?:\?(?:[:>=!|]|<[=!]|<\w+>|[a-zA-Z-]*:)|(?!\?)))|(?P<close>\))"
    r"|(?P<ambiguous>\{\d+\}\?|\(\?)|(?P<repeat>\{\d*,?\d*\}|[*+?])"
    r"|(?P<escape>\\[pP]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.)|(?P<other>.)",
    regex.DOTALL,
)
_CLASS_PART = regex.compile(
    r"\[:(?P<negated>\^?)(?P<name>\w+):\]|\\[pP]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.|.", regex.DOTALL
)
_OTHER_ESCAPE = regex.compile(r"\\(?!x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pPdDwWsSbBrntfva])[0-9A-Za-z]")
_OTHER_SET = regex.compile(r"(?<!\\)(?:\\\\)*\[(?!:)|&&|\\[bB]")  # a nested class, an intersection, a backspace
_HIGH_BYTE = regex.compile(r"(?<!\\)((?:\\\\)*)\\x([89A-Fa-f][0-9A-Fa-f])")
_CASELESS = regex.compile(r"\(\?[a-z]*i[a-z-]*(?P<end>[:)])")
_WITHOUT_WIDTH = regex.compile(r"\\[AZzG]$|[\^$]$|\(\?<?[=!]|\(\?:\(\?<")  # a place, like \b; or a look-around
_ESCAPES_FROM = {r"\A": "^", r"\Z": "$", r"\z": r"\Z", "^": "(?m:^)", "$": "(?m:$)"}
_ESCAPES_TO = {r"\A": r"\A", r"\Z": r"\z", "^": r"\A", "$": r"\Z", "(?m:^)": "^", "(?m:$)": "$"}
# The content of a class of the other syntax that matches the same characters. The first of each is that of \w outside
# of a class; inside, it is the second.
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}"
_CLASSES_FROM = {
    "w": _WORD + r"\u00B2\u00B3\u00B9\u00BC-\u00BE\p{Pc}",  # with superscripts and fractions
    "word": _WORD + r"\p{Pc}",
    "alnum": r"\p{Alphabetic}\d",
    "digit": r"\d",
    "punct": r"\p{P}\p{S}",
}
_CLASSES_TO = {
    "w": _WORD + r"\u200C\u200D\p{Pc}",  # with the joiners
    "word": _WORD + r"\u200C\u200D\p{Pc}",
    "alnum": r"\p{Alphabetic}0-9",
    "digit": "0-9",
}
_EQUAL_CLASSES = {"alpha", "ascii", "blank", "cntrl", "graph", "lower", "print", "space", "upper", "xdigit"}
# Two or three characters that equal one without case, like ss and ß, to Oniguruma only.
FOLDS = {
    character.casefold()
    for first, last in (("ß", "ß"), ("İ", "İ"), ("ŉ", "ǰ"), ("ΐ", "ΰ"), ("և", "և"), ("ẖ", "ῼ"), ("ﬀ", "ﬗ"))
    for character in map(chr, range(ord(first), ord(last) + 1))
    if len(character.casefold()) > 1
}


def from_oniguruma(pattern: str) -> str:
    """Return the pattern in the syntax of ``regex``. Raises UserError, by name, for what has no translation here."""

    def translate(kind: str, item: str) -> str | None:
        if kind in ("flags", "open") and (flags := regex.fullmatch(r"\(\?([a-zA-Z-]+)([:)])", item)):
            # Flags in the middle of a pattern hold for different parts of it in the two syntaxes.
            is_supported = set(flags[1]) <= set("im-") and (kind == "open" or pattern.startswith(item))
            return f"(?{flags[1].replace('m', 's')}{flags[2]}" if is_supported else None
        if _HIGH_BYTE.search(item):
            return None
        return _translate_escape(kind, item, _ESCAPES_FROM, _CLASSES_FROM)

    return _translate(pattern, translate, is_export=False)


def to_oniguruma(pattern: str) -> str:
    """Return a pattern of ``regex`` in the syntax of Oniguruma.

    Raises UserError, by name, for what has no translation.
    """

    def translate(kind: str, item: str) -> str | None:
        if kind in ("flags", "open") and (flags := regex.fullmatch(r"\(\?([a-zA-Z-]+)([:)])", item)):
            if "m" in flags[1]:
                raise UserError(
                    f"{item!r} of the pretoken pattern {pattern!r} cannot be exported: write (?m:^) and (?m:$) for the "
                    "start and end of a line."
                )
            is_supported = set(flags[1]) <= set("is-") and (kind == "open" or pattern.startswith(item))
            return f"(?{flags[1].replace('s', 'm')}{flags[2]}" if is_supported else None
        return _translate_escape(kind, _HIGH_BYTE.sub(r"\1\\u00\2", item), _ESCAPES_TO, _CLASSES_TO)

    return _translate(pattern, translate, is_export=True)


def _translate_escape(kind: str, item: str, escapes: Mapping[str, str], classes: Mapping[str, str]) -> str | None:
    """Translate an item that is not about flags. None if there is no translation."""
    word, no_word = f"[{classes['w']}]", f"[^{classes['w']}]"
    boundaries = {
        r"\w": word,
        r"\W": no_word,
        r"\b": f"(?:(?<={word})(?!{word})|(?<!{word})(?={word}))",
        r"\B": f"(?:(?<={word})(?={word})|(?<!{word})(?!{word}))",
    }
    if kind == "class":
        return _translate_class(item, classes)
    if item in escapes or item in boundaries:
        return escapes.get(item) or boundaries[item]
    return None if kind == "ambiguous" or (kind == "escape" and _OTHER_ESCAPE.match(item)) else item


def _translate_class(item: str, classes: Mapping[str, str]) -> str | None:
    """Translate a class in brackets. None if there is no translation."""
    if _OTHER_SET.search(item[1:-1]) or _OTHER_ESCAPE.search(item):
        return None
    negation = "^" if item.startswith("[^") else ""
    content, has_no_word = "", False
    for part in _CLASS_PART.finditer(item[1 + len(negation) : -1]):
        if part["name"] and part["name"] not in _EQUAL_CLASSES:
            if part["negated"] or part["name"] not in classes:
                return None
            content += classes[part["name"]]
        elif part[0] == r"\W":
            has_no_word = True
        else:
            content += classes["word"] if part[0] == r"\w" else part[0]
    if not has_no_word:
        return f"[{negation}{content}]"
    word, no_word = f"[{classes['word']}]", f"[^{classes['word']}]"
    if not content:
        return word if negation else no_word
    return f"(?:(?![{content}]){word})" if negation else f"(?:{no_word}|[{content}])"


@cache
def _depends_on_case(item: str) -> bool:
    """Return whether a class holds a property of case, like ``\\p{Lu}``: with ``(?i)`` the two syntaxes differ."""
    content = item[1:-1].removeprefix("^") if item.startswith("[") else item
    for part in _CLASS_PART.finditer(content):
        if part["name"] or part[0].startswith((r"\p", r"\P")):
            one = f"[{part[0]}]"
            if regex.findall(one, "aAǅ") != regex.findall(f"(?i:{one})", "aAǅ"):
                return True
    return False


def _is_refused_behind(item: str, groups: Sequence[str]) -> bool:
    """Return whether Oniguruma refuses a translated item because a group around it is a look-behind."""
    refused = r"\(\?[=!]" if "(?<!" not in groups else r"\(\?[=!]|^\($|^\(\?<\w"
    return ("(?<=" in groups or "(?<!" in groups) and regex.search(refused, item) is not None


def _translate(pattern: str, translate: Callable[[str, str], str | None], is_export: bool) -> str:
    """Translate each item of a pattern; ``x{1,3}+`` without its plus sign, in another group."""
    before, after, refusal = ("(?>", ")", "cannot be exported") if is_export else ("(?:", ")+", "is not supported")
    items: list[str] = []
    opened: list[int] = []  # indices in ``items`` of the groups that are open
    atom = repeat = -1  # index of the last atom; of its interval, if that is the last item
    is_all_caseless = (flags := _CASELESS.match(pattern)) is not None and flags["end"] == ")"
    caseless = ""  # the last characters that are matched without case
    for match in _ITEM.finditer(pattern):
        kind, item = str(match.lastgroup), match.group()
        groups = [items[index] for index in opened]
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
        is_caseless = is_all_caseless or any(map(_CASELESS.match, groups))
        caseless = (caseless + item.casefold())[-3:] if kind == "other" and is_caseless else ""
        folds = [fold for fold in FOLDS if fold in caseless]
        is_refused = bool(folds) or (is_caseless and kind in ("class", "escape") and _depends_on_case(item))
        translated = None if is_refused else translate(kind, item)
        repeats_place = kind == "repeat" and atom >= 0 and _WITHOUT_WIDTH.match(items[atom])
        if is_export and translated and (repeats_place or _is_refused_behind(translated, groups)):
            translated = None
        if translated is None:
            raise UserError(f"{folds[0] if folds else item!r} of the pretoken pattern {pattern!r} {refusal}.")
        items.append(translated)
    return "".join(items)
