"""``textmill teach`` against a local endpoint: kills, time, budget and messages."""

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.teach import TeachResult, teach
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.eval import chat_client
from lm.eval.config import TeachConfig
from tests.helpers.chat_endpoint import Asked, ChatEndpoint, Reply, completion, serve_chat
from tests.helpers.deployed import TEXTMILL, own_environment
from tests.helpers.generating import make_model
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli.main import main
from textmill.server.app import build_app

NUMBERS = 40
FAILURES = [Reply(status=500), Reply(status=429, headers={"Retry-After": "0"}), Reply(status=None), Reply(body=b"{")]


@pytest.fixture(autouse=True, scope="module")
def _short_delays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_client, "_FIRST_DELAY_SECONDS", 0.001)
        yield


def double(asked: Asked, attempt: int) -> Reply:
    """Answer "What is 2 times N?". The answer to a multiple of 5 is wrong."""
    number = int(asked.prompt.split()[-1].rstrip("?"))
    return Reply(completion(f"It is {2 * number + (number % 5 == 0)}."))


def write_gsm8k(path: Path, count: int = NUMBERS) -> str:
    rows = [{"question": f"What is 2 times {number}?", "answer": f"#### {2 * number}"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def expected_rows(count: int = NUMBERS) -> list[dict[str, str]]:
    numbers = [number for number in range(count) if number % 5]
    return [{"prompt": f"What is 2 times {number}?", "response": f"It is {2 * number}."} for number in numbers]


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(endpoint: ChatEndpoint, tmp_path: Path, **options: Any) -> TeachResult:
    return teach(TeachConfig(url=endpoint.url, model="tiny", out=str(tmp_path / "taught.jsonl"), **options))


def test_right_answers_are_kept_and_asked_for_once(tmp_path: Path) -> None:
    file = write_gsm8k(tmp_path / "gsm8k.jsonl")
    with serve_chat(double) as endpoint:
        result = run(endpoint, tmp_path, file=file, task="gsm8k")
        assert rows_of(result.file) == expected_rows()
        assert result.outcomes == {"kept": 32, "low reward": 8}
        assert (result.prompts, result.answers, result.earlier_answers) == (40, 40, 0)
        assert (result.prompt_tokens, result.completion_tokens) == (200, 120)
        assert len(endpoint.requests) == 40
        lenient = run(endpoint, tmp_path, file=file, task="gsm8k", threshold=0.0)
        assert (len(rows_of(lenient.file)), lenient.earlier_answers) == (40, 40)
        assert len(endpoint.requests) == 40  # another threshold, the same answers
        for weight in (0.1, 3.0):  # by default, the full reward is needed whatever the weights are
            weighted = run(endpoint, tmp_path, file=file, task="gsm8k", rewards={"gsm8k": weight, "exact": -1.0})
            assert rows_of(weighted.file) == expected_rows()
        more = run(endpoint, tmp_path, file=file, task="gsm8k", samples=2)
        assert (more.answers, more.earlier_answers, more.outcomes["repeated"]) == (80, 40, 32)
        assert rows_of(more.file) == expected_rows()
        assert len(endpoint.requests) == 80


@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 2))
@settings(max_examples=8)
def test_the_file_does_not_depend_on_time_and_failures(
    tmp_path_factory: pytest.TempPathFactory, generator: random.Random, max_in_flight: int, samples: int
) -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        delay = generator.random() * 0.02
        if attempt < 4 and generator.random() < 0.2:
            return Reply(**{**vars(generator.choice(FAILURES)), "delay": delay})
        return Reply(completion(f"to {asked.prompt}"), delay=delay)

    tmp_path = tmp_path_factory.mktemp("taught")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(12)))
    with serve_chat(reply) as endpoint:
        result = run(endpoint, tmp_path, file=str(prompts), max_in_flight=max_in_flight, samples=samples)
    lines = [json.dumps({"prompt": str(number), "response": f"to {number}"}) + "\n" for number in range(12)]
    assert result.file.read_bytes() == "".join(lines).encode()
    assert result.failures == []


def test_a_failed_prompt_is_named_and_asked_again(tmp_path: Path) -> None:
    file = write_gsm8k(tmp_path / "gsm8k.jsonl", 9)
    refused = Reply(status=400, body=b'{"error": {"message": "too long"}}')
    with serve_chat(
        lambda asked, attempt: double(asked, 0) if attempt or "3?" not in asked.prompt else refused
    ) as endpoint:
        result = run(endpoint, tmp_path, file=file, task="gsm8k")
        assert (result.failures, result.answers, result.not_asked) == (["prompt 4: status 400: too long"], 8, 0)
        assert rows_of(result.file) == [row for row in expected_rows(9) if "3?" not in row["prompt"]]
        result = run(endpoint, tmp_path, file=file, task="gsm8k")
        assert (result.failures, rows_of(result.file)) == ([], expected_rows(9))
    assert len(endpoint.requests) == 10


@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_no_prompt_is_sent_after_the_budget_is_reached(max_in_flight: int, tmp_path: Path) -> None:
    file = write_gsm8k(tmp_path / "gsm8k.jsonl")
    options: dict[str, Any] = {"file": file, "task": "gsm8k", "max_in_flight": max_in_flight}
    with serve_chat(double) as endpoint:
        result = run(endpoint, tmp_path, **options, token_budget=73)  # an answer with its prompt has 8 tokens
        assert 10 <= len(endpoint.requests) < 10 + max_in_flight
        assert result.answers == len(endpoint.requests)
        assert result.not_asked == 40 - result.answers
        again = run(endpoint, tmp_path, **options, token_budget=73)
        assert (again.answers, again.earlier_answers) == (result.answers, result.answers)  # nothing is spent twice
        assert run(endpoint, tmp_path, **options, token_budget=320).not_asked == 0
    assert len(endpoint.requests) == 40


def test_a_budget_needs_a_server_that_counts_tokens(tmp_path: Path) -> None:
    file = write_gsm8k(tmp_path / "gsm8k.jsonl")
    with serve_chat(lambda *_: Reply(completion("a", usage=None))) as endpoint:
        with pytest.raises(UserError, match="leave out the token budget"):
            run(endpoint, tmp_path, file=file, task="gsm8k", token_budget=100, max_in_flight=1)
        assert run(endpoint, tmp_path, file=file, task="gsm8k").earlier_answers == 1


@pytest.mark.slow
def test_our_own_server_answers_all_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(30)))
    tokenizer = add_chat_tokens(bytes_tokenizer(["<|endoftext|>"]))
    model = make_model(tokenizer.size, 64).eval()
    with serve_app(build_app(model, tokenizer, "tiny", 2)) as url:
        config = TeachConfig(url, "tiny", str(prompts), seed=0, max_new_tokens=4, out=str(tmp_path / "taught.jsonl"))
        result = teach(config)
        assert teach(replace(config, max_new_tokens=1024, count=2)).failures == [], "more than the context of 64"
    assert (result.answers, result.failures) == (30, [])
    assert 30 <= result.completion_tokens <= 30 * 4
    assert result.outcomes["cut at the maximum"] > 0


def arguments(endpoint: ChatEndpoint, tmp_path: Path, *options: str) -> list[str]:
    file = write_gsm8k(tmp_path / "gsm8k.jsonl")
    out = str(tmp_path / "taught.jsonl")
    names = ["--url", endpoint.url, "--model", "tiny", "--task", "gsm8k", "--file", file, "--out", out]
    return ["teach", *names, *options]


def test_the_command_prints_a_table_and_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Reply(status=400, body=b'{"error": {"message": "too long"}}')
    with serve_chat(lambda asked, _: refused if "13?" in asked.prompt else double(asked, 0)) as endpoint:
        assert main(arguments(endpoint, tmp_path, "--token_budget", "100000")) == 0
    output = capsys.readouterr().out
    for line in (
        "answers             39, 0 of them from earlier runs",
        "failed              1",
        "kept                31 (79.5% of the answers)",
        "tokens              195 of prompts, 117 of answers",
        "  prompt 14: status 400: too long",
        f"  textmill posttrain --preset dialogs --dialogs.train {tmp_path}/taught.jsonl",
    ):
        assert line in output.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "ftp://x"], "not the URL of a server"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--task", "gsm9k"], "There is no task 'gsm9k' (did you mean 'gsm8k'?)"),
        (["--rewards", "{gsm9k: 1}"], "There is no reward 'gsm9k'"),
        (["--rewards", "{gsm8k: 0.5}", "--threshold", "0.6"], "threshold is 0.6, but the full reward is 0.5; lower it"),
        (["--samples", "0"], "teach.samples is 0; it must be at least 1"),
        (["--out", "taught.json"], "must end with .jsonl"),
        (["--out", "taught.answers.jsonl"], "not with .answers.jsonl, where a run keeps all"),
        (["--prompt", "x"], "has no {question}"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes_are_messages(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_chat(double) as endpoint:
        assert main(arguments(endpoint, tmp_path, *options)) == 2
        assert endpoint.requests == []
    assert message in capsys.readouterr().err


def test_a_threshold_needs_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    with serve_chat(double) as endpoint:
        options = ["--task", "", "--file", str(tmp_path / "prompts.jsonl"), "--threshold", "0.5"]
        assert main(arguments(endpoint, tmp_path, *options)) == 2
        assert endpoint.requests == []
    assert "there is no reward; name rewards" in capsys.readouterr().err


def test_the_prompts_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = write_gsm8k(tmp_path / "p.answers.jsonl")
    with serve_chat(double) as endpoint:
        overwriting = ["--out", str(tmp_path / "gsm8k.jsonl")]
        for options in (overwriting, ["--file", answers, "--out", str(tmp_path / "p.jsonl")]):
            assert main(arguments(endpoint, tmp_path, *options)) == 2
            assert "the file of the prompts" in capsys.readouterr().err
        assert endpoint.requests == []
    assert len(rows_of(Path(answers))) == NUMBERS


def test_a_server_that_refuses_each_request_is_a_message(tmp_path: Path) -> None:
    refused = Reply(status=400, body=b'{"error": {"message": "max_tokens is too large"}}')
    options: dict[str, Any] = {"file": write_gsm8k(tmp_path / "gsm8k.jsonl"), "task": "gsm8k", "max_in_flight": 4}
    with serve_chat(lambda *_: refused) as endpoint:
        with pytest.raises(UserError, match=r"refuses all requests: status 400: max_tokens is too large\. Check"):
            run(endpoint, tmp_path, **options)
        assert 20 <= len(endpoint.requests) < 24
    with serve_chat(lambda asked, _: double(asked, 0) if " 7?" in asked.prompt else refused) as endpoint:
        for _ in range(2):  # the second time, the answer is an earlier one
            assert len(run(endpoint, tmp_path, **options).failures) == NUMBERS - 1


def test_malformed_answers_cost_one_request_each_and_count_in_the_budget(tmp_path: Path) -> None:
    bad = Reply(completion({"text": "not a text"}))
    options: dict[str, Any] = {"file": write_gsm8k(tmp_path / "gsm8k.jsonl"), "task": "gsm8k", "max_in_flight": 1}
    with serve_chat(lambda *_: bad) as endpoint:
        with pytest.raises(UserError, match="No answer of the server can be read: the answer is malformed"):
            run(endpoint, tmp_path, **options)
        assert len(endpoint.requests) == 20
    with serve_chat(lambda asked, _: double(asked, 0) if " 3?" in asked.prompt else bad) as endpoint:
        result = run(endpoint, tmp_path, **options, token_budget=73)  # an answer with its prompt has 8 tokens
        assert (result.answers, len(result.failures), len(endpoint.requests)) == (1, 9, 10)


def test_answers_in_parts_are_read(tmp_path: Path) -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        text = json.loads(double(asked, attempt).body)["choices"][0]["message"]["content"]
        return Reply(completion([{"type": "thinking", "thinking": "a"}, {"type": "text", "text": text}]))

    with serve_chat(reply) as endpoint:
        result = run(endpoint, tmp_path, file=write_gsm8k(tmp_path / "gsm8k.jsonl"), task="gsm8k")
    assert rows_of(result.file) == expected_rows()
    assert len(endpoint.requests) == NUMBERS


def test_a_wrong_key_is_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    body = b'{"error": {"message": "Incorrect API key provided: sk-wrong"}}'
    with serve_chat(lambda *_: Reply(status=401, body=body)) as endpoint:
        assert main(arguments(endpoint, tmp_path)) == 2
    error = capsys.readouterr().err
    assert "401: Incorrect API key provided: …. Check" in error.replace("\n", " ")
    assert "OPENAI_API_KEY" in error
    assert "sk-wrong" not in error + "".join(path.read_text() for path in tmp_path.iterdir())


def start(endpoint: ChatEndpoint, tmp_path: Path, answers: float, number: signal.Signals) -> tuple[int, str]:
    """Run the command, send it the signal ``number`` after ``answers`` answers, and return its exit code and output."""
    command = [*TEXTMILL, *arguments(endpoint, tmp_path, "--max_in_flight", "5", "--samples", "2")]
    environment = {**os.environ, **own_environment(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(lambda: len(endpoint.answered) >= answers or process.poll() is not None, 120, "moment of the kill")
        process.send_signal(number)
        output, error = process.communicate()
    return process.returncode, output + error


_SIGTERM = pytest.param(signal.SIGTERM, marks=pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, _SIGTERM])
def test_a_killed_command_continues(number: signal.Signals, tmp_path: Path) -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        return Reply(double(asked, 0).body, delay=random.uniform(0.0, 0.1))

    with serve_chat(reply) as endpoint:
        for answers in (10, 35, 60):
            code, output = start(endpoint, tmp_path, answers, number)
            assert code == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number], output
            assert "Traceback" not in output
            assert not (tmp_path / "taught.jsonl").exists()
        asked_before = len(endpoint.requests)
        kept = (tmp_path / "taught.answers.jsonl").read_bytes().count(b"\n")
        assert kept >= 60 - 3 * 5
        code, output = start(endpoint, tmp_path, math.inf, signal.SIGKILL)
        assert code == 0, output
        assert len(endpoint.requests) - asked_before == 80 - kept  # no answer in the file is asked for
        assert len(endpoint.requests) <= 80 + 3 * 5  # again at most those in flight at each kill
    assert rows_of(tmp_path / "taught.jsonl") == expected_rows()
