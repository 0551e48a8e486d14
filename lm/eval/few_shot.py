"""Prompts of an evaluation: a problem, with solved examples before it, as text or as a dialog."""

from collections.abc import Sequence
from itertools import islice

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.eval.problems import R1_ZERO_PROMPT, Problem

Prompt = str | list[Message]

_QUESTION = "{question}"
PROMPT_TEMPLATES = {"question": _QUESTION, "r1_zero": R1_ZERO_PROMPT}
"""Templates of a question by name."""

_SEPARATOR = "\n\n"


class PromptFormat:
    """Makes the prompts for the problems of a task.

    ``template`` is the text of a question, with ``{question}`` in the place of the problem's prompt. The first
    ``shots`` of ``examples`` that have a solution, and are not the problem itself, come before it. Raises UserError if
    the template has no ``{question}``.
    """

    def __init__(
        self, template: str = _QUESTION, shots: int = 0, examples: Sequence[Problem] = (), is_plain: bool = False
    ) -> None:
        if _QUESTION not in template:
            raise UserError(f"The template of the prompt, {template[:60]!r}, has no {_QUESTION} in it.")
        self._template, self._shots, self._is_plain = template, shots, is_plain
        self._examples = [example for example in examples if example.solution]
        stop = _SEPARATOR + template.partition(_QUESTION)[0].rstrip()
        is_in_solution = any(stop in (example.solution or "").strip() for example in self._examples[: shots + 1])
        self.stop = [stop] if shots and is_plain and not is_in_solution else []
        """Texts that start the next example. A model that continues text would go on with it."""

    def format(self, problem: Problem) -> Prompt:
        """Return the prompt: text to continue if the format is plain, else a dialog.

        Raises UserError if there are too few examples.
        """
        others = (example for example in self._examples if example.prompt != problem.prompt)
        examples = list(islice(others, self._shots))
        if len(examples) < self._shots:
            raise UserError(f"{self._shots} solved examples are requested, and there are {len(examples)}; give more.")
        if self._is_plain:
            solved = [f"{self._fill(example)} {(example.solution or '').strip()}" for example in examples]
            return _SEPARATOR.join([*solved, self._fill(problem)])
        messages = []
        for example in examples:
            messages.append(Message(role="user", content=self._fill(example)))
            messages.append(Message(role="assistant", content=example.solution or ""))
        return [*messages, Message(role="user", content=self._fill(problem))]

    def _fill(self, problem: Problem) -> str:
        return self._template.replace(_QUESTION, problem.prompt)
