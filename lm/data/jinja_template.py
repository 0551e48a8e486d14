"""Chat templates in Jinja, rendered as transformers does; those of other people in a process of their own.

``python -m lm.data.jinja_template`` answers requests of :func:`render_foreign`. Jinja's sandbox keeps a template from
the attributes of Python's objects, and the process bounds its time and memory.
"""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess, serve_parent

GENERATION_MARKS = "\ufddf", "\ufdde"
"""What begins and ends the assistant's part in the text of a template with ``{% generation %}``: no characters of
Unicode, so no text has them."""
_MAX_SECONDS = 0.7  # of CPU time; usual templates take milliseconds
_MAX_MEMORY_BYTES = 1 << 30  # of the process, which has some 50 MB to begin with
_MAX_CHARACTERS = 16 << 20  # of a rendered dialog
_PROCESS_LOCK = threading.Lock()
_processes: list[ChildProcess] = []  # the one that renders, once it is needed


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, as in transformers: the assistant's part of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in GENERATION_MARKS)
        return [begin, *body, end]


class ChatTemplate(NamedTuple):
    """The template of a model."""

    sources: Mapping[str, str]
    """Jinja by name: ``default``, and maybe ``tool_use``."""
    tokens: Mapping[str, str]
    """Variables such as ``eos_token``."""
    render: Callable[[str, Mapping[str, Any], str | None], str]
    """Renders a source with variables."""

    @property
    def is_own(self) -> bool:
        """Whether it is the template of this project."""
        return self.render is render

    def write(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], day: str | None = None) -> str:
        """Return the text of a dialog. ``variables``: ``tools``, ``add_generation_prompt`` and others of the template.

        A template that asks for the date gets ``day``, in ISO's form, and today's by default. Raises UserError if the
        template refuses the dialog.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self.sources else "default"
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        return self.render(self.sources[name], {**self.tokens, **defaults, **variables, "messages": messages}, day)


def render(source: str, variables: Mapping[str, Any], day: str | None = None) -> str:
    """Return the text of a template. Raises UserError with the reason if it cannot be rendered."""
    moment = datetime.fromisoformat(day) if day else datetime.now()
    try:
        text: str = _compile(source).render({"strftime_now": moment.strftime, **variables})
    except TemplateError as error:
        raise UserError(f"The chat template refuses the dialog: {str(error) or type(error).__name__}.") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"The chat template cannot be rendered: {type(error).__name__}: {str(error)[:200]}.") from None
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"The chat template makes {len(text):,} characters; at most {_MAX_CHARACTERS:,} are possible.")
    return text


def render_foreign(source: str, variables: Mapping[str, Any], day: str | None = None) -> str:
    """Do the same as :func:`render` for a template that nobody has read, in another process.

    Raises UserError also if the template takes too long or too much memory.
    """
    request = json.dumps([source, variables, day]).encode()
    with _PROCESS_LOCK:
        if not (_processes and _processes[0].is_running):
            _processes[:] = [ChildProcess(__name__)]
        try:
            answer = json.loads(_processes[0].ask(request))
        except ChildEnded:
            raise UserError(
                f"The chat template takes more than {_MAX_SECONDS} s or {_MAX_MEMORY_BYTES >> 30} GiB of memory, or "
                "its process was killed. Correct it, or use another one."
            ) from None
    if "problem" in answer:
        raise UserError(answer["problem"])
    return str(answer["text"])


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _answer(work: Callable[[], str]) -> bytes:
    try:
        return json.dumps({"text": work()}).encode()
    except UserError as error:
        problem = str(error)
    except BaseException as error:  # a hostile template raises anything
        problem = f"The chat template cannot be rendered: {type(error).__name__}."
    return json.dumps({"problem": problem}).encode()


def main() -> None:
    """Answer requests until the input ends."""
    requests, send_answer = serve_parent()
    _environment()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for request in requests:
        arguments = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, _MAX_SECONDS)
        answer = _answer(partial(render, *arguments))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(answer)


if __name__ == "__main__":
    main()
