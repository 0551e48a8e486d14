"""The first hour of a newcomer, played in a terminal of 80 × 24 characters.

``python -m tests.end_to_end.first_hour`` writes it to docs/first-hour.md.
"""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from lm.text.demo_corpus import demo_stories
from tests.helpers.deployed import TEXTMILL, own_environment
from tests.helpers.processes import PROJECT
from tests.helpers.terminal import Terminal, final_lines

_SECONDS = 600  # more than any command takes

_OPTIONS = {
    "run": "--data.train demo:400 --train.steps 30 --model.d_model 32 --model.d_ff 96",
    "posttrain": "--methods sft --sft.steps 5 --dialogs.train_problems 50 --dialogs.test_problems 5",
    "chat": "--max_new_tokens 8",
    "serve": "--port 0",
}
"""Options that make the hour last a minute. The root remembers those of a run."""


class Scene(NamedTuple):
    """A command, and what the terminal showed."""

    command: str
    lines: list[str]
    remark: str
    """What a reader should know before."""


class Hour:
    """Plays commands in a folder with a text, and with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.scenes: list[Scene] = []
        self._folder = folder / "work"
        self._folder.mkdir()
        (self._folder / "stories.txt").write_text("".join(demo_stories(300)), encoding="utf-8")
        own = own_environment(folder) | {"HOME": str(folder), "TERM": "xterm-256color", "PYTHONPATH": str(PROJECT)}
        self._environment = {
            name: value
            for name, value in (os.environ | own).items()
            if name not in ("NO_COLOR", "COLUMNS", "LINES") and not re.fullmatch("PREFECT_.*LOGGING_LEVEL", name)
        }

    def play(self) -> None:
        """Play the whole hour."""
        self._play("", "`textmill` alone shows what there is.")
        self._play("run", "The first run makes a model from the demo's stories.")
        own = "run --data.train stories.txt"
        self._play(
            own,
            "Now your own text. Ctrl-C stops the training.",
            lambda terminal: terminal.answer(" step 1/", "\x03"),
            code=130,
        )
        self._play(own, "The same command goes on.")
        listed = self._play("runs", "All runs so far, the newest first.")
        finished = [line.split()[0] for line in listed if " finished " in line]
        self._play(f"compare {' '.join(finished)}", "Two runs side by side, as a table and as figures.")
        self._play("posttrain", "The model learns to answer from examples.")
        self._play("chat", "Ask it.", _chat)
        self._play(
            "serve", "Serve it. Here, a request came from another terminal; then Ctrl-C ended the server.", _request
        )

    def _play(
        self, command: str, remark: str, act: Callable[[Terminal], None] = lambda terminal: None, code: int = 0
    ) -> list[str]:
        command = f"textmill {command} {_OPTIONS.get(command, '')}".strip()
        with Terminal([*TEXTMILL, *command.split()[1:]], self._folder, self._environment) as terminal:
            act(terminal)
            assert terminal.wait(_SECONDS) == code, terminal.output
        lines = final_lines(terminal.output)
        self.scenes.append(Scene(command, lines, remark))
        return lines


def _chat(terminal: Terminal) -> None:
    terminal.answer("User: ", "12 + 34 =\n")
    terminal.answer(r"(?s)Assistant: .*\nUser: ", "/quit\n")


def _request(terminal: Terminal) -> None:
    page = terminal.wait_for(r"Page to try it: (http\S+)/\s", _SECONDS)[1]
    body = {"model": "textmill", "prompt": "12 + 34 =", "max_tokens": 4}
    httpx.post(f"{page}/v1/completions", json=body, timeout=_SECONDS).raise_for_status()
    terminal.type("\x03")


def _format_page(scenes: list[Scene]) -> str:
    """Return the hour as a page of the documentation. Paths begin in the working directory; digests in them are cut."""
    introduction = (
        "What a terminal of 80 columns shows in a first hour with textmill. Some options make the trainings so short\n"
        "that the models learn little. Without them, `textmill run` takes a minute or two, and its stories\n"
        "make sense. `python -m tests.end_to_end.first_hour` plays the hour again and renews this page."
    )
    parts = ["# The first hour", introduction]
    for scene in scenes:
        text = "\n".join([f"$ {scene.command}", *scene.lines]).strip()
        shown = re.sub("([0-9a-f]{8})[0-9a-f]{56}", r"\1…", re.sub(r"/\S+/work/", "", text))
        parts.append(f"{scene.remark}\n\n```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        hour = Hour(Path(folder))
        hour.play()
    (PROJECT / "docs" / "first-hour.md").write_text(_format_page(hour.scenes), encoding="utf-8")
