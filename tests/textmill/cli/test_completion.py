"""The scripts that complete command lines: bash's is sourced and asked, those of other shells are looked at."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.cli.main import main

_ASK = """
source "$1"; shift
[[ $(complete -p textmill) == *" -F "* ]] || exit 3
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p textmill | sed 's/.* -F \\([^ ]*\\).*/\\1/')
compopt() { :; }  # it needs a completion of readline
"$function" textmill "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "textmill.bash").write_text(script("bash", capsys), encoding="utf-8")
    (tmp_path / "stories.txt").touch()

    def complete(*words: str) -> set[str]:
        command = ["bash", "--norc", "-c", _ASK, "bash", str(tmp_path / "textmill.bash"), "textmill", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.stderr, done.returncode) == ("", 0)
        return {*done.stdout.split()}

    assert complete("ru") == {"run", "runs"}
    assert complete("run", "--train.st") == {"--train.steps"}
    assert "--train.max_lr" in complete("run", "--train.m")
    assert not complete("run", "--data.train+"), "a form of the library"
    assert "--sft.steps" in complete("posttrain", "--sft.")
    assert complete("run", "--train.optimizer", "a") == {"adamw"}
    assert complete("run", "--config", "st") == {"stories.txt"}
    assert complete("completion", "z") == {"zsh"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_all_commands_and_no_words_of_the_parser(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    assert "posttrain" in text and "train.steps" in text
    assert not [word for word in ("<class", "typing.", "Literal[", "Namespace") if word in text]


def test_another_shell_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "shell is 'tcsh'; it must be" in capsys.readouterr().err


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'textmill[completion]'" in capsys.readouterr().err
