"""The scripts that complete command lines: each is loaded by its shell and asked."""

import os
import re
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

# A Tab ends the word of each line, then the function prints what it gets.
_ASK_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; textmill() { print -r GOT \"\$*\" }"
shift
for line; do zpty -w shell "$line"$'\t'; done
zpty -w shell exit
while zpty -r shell line; do print -r -- "$line"; done
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


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish")
def test_fish_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "textmill.fish").write_text(script("fish", capsys), encoding="utf-8")

    def complete(line: str) -> set[str]:
        command = ["fish", "--no-config", "-c", "source textmill.fish; complete -C $argv[1]", line]
        environment = os.environ | {"HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert (done.stderr, done.returncode) == ("", 0)
        return {answer.partition("\t")[0] for answer in done.stdout.splitlines() if answer}

    assert complete("textmill ru") == {"run", "runs"}
    assert complete("textmill run --train.st") == {"--train.steps"}
    assert complete("textmill run --train.optimizer ") == {"adamw", "muon", "normuon", "soap_muon"}


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "_textmill").write_text(script("zsh", capsys), encoding="utf-8")
    lines = ["textmill swee", "textmill run --train.ste", "textmill run --train.optimizer mu"]
    command = ["zsh", "-f", "-c", _ASK_ZSH, "zsh", str(tmp_path), *lines]
    environment = os.environ | {"HOME": str(tmp_path), "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert re.findall(r"^GOT ([\w. -]+?)\s*$", done.stdout, re.MULTILINE) == [
        "sweep",
        "run --train.steps",
        "run --train.optimizer muon",
    ]
    assert "error" not in done.stdout


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
