"""textmill evaluate: known answers of a stub endpoint, and the same responses of a model here and behind our server."""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import EndpointModel, evaluate_model
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.eval import chat_client, load_task, read_task
from lm.eval.config import EvaluationConfig
from lm.eval.problems import R1_ZERO_PROMPT, Problem
from lm.text.rows import DamagedRows
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import make_model
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli.main import main
from textmill.server.app import build_app

PLAIN = bytes_tokenizer(["<|endoftext|>"])
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG_ANSWER = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
WRONG_FORMAT = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


def known_output(number: int, truth: str) -> tuple[str, dict[str, float], str]:
    """Return the stub's response to a problem, the rewards it deserves, and its category."""
    return [
        (f"I add. </think> <answer>{truth}</answer>", RIGHT, "right"),
        (f"I add.\n</think>\n<answer>\n{truth}\n</answer>\n", RIGHT, "right"),
        (f"I add.</think> <answer>{truth}7</answer>", WRONG_ANSWER, "wrong answer"),
        (f"<answer>{truth}</answer>", WRONG_FORMAT, "wrong format"),
        (f"I add.</think> so <answer>{truth}</answer>", WRONG_FORMAT, "wrong format"),
    ][number % 5]


class Stub:
    """A server that knows the answers to problems, and gives them after random delays."""

    def __init__(self, problems: Sequence[Problem], delay_seconds: float = 0.0) -> None:
        self.outputs = {
            R1_ZERO_PROMPT.replace("{question}", problem.prompt): known_output(number, problem.ground_truth)
            for number, problem in enumerate(problems)
        }
        self.requests: list[dict[str, Any]] = []
        self.refused: set[str] = set()
        """Prompts that get the status ``refusal``."""
        self.refusal = 400
        self.delay_seconds = delay_seconds
        self.models = ["known"]
        self.list_status = 200

    def answer(self, request: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(request)
        time.sleep(random.random() * self.delay_seconds)
        [message] = request["messages"]
        if message["content"] in self.refused:
            return self.refusal, {"error": {"message": "too long"}}
        text = self.outputs[message["content"]][0]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": len(text)}}


@contextmanager
def run_stub(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(stub.list_status if stub.models else 404, {"data": [{"id": name} for name in stub.models]})

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            self._send(*stub.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def read_rows(path: Path) -> list[dict[str, Any]]:
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert header.keys() == {"settings"}
    return rows


def write_gsm8k(path: Path, count: int) -> list[Problem]:
    rows = [{"question": f"{n} + 1,0{n}?", "answer": f"I add.\n#### {n + 1000 + n:,}"} for n in range(10, 10 + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_task("gsm8k", str(path), DamagedRows()).problems


def r1_zero(file: Path, **options: Any) -> EvaluationConfig:
    return EvaluationConfig(task="gsm8k", file=str(file), prompt="r1_zero", reward="r1_zero", **options)


def check_known_outputs(rows: Sequence[dict[str, Any]], problems: Sequence[Problem]) -> None:
    assert [row["index"] for row in rows] == list(range(len(problems)))
    for number, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        text, rewards, category = known_output(number, problem.ground_truth)
        assert (row["response"], row["rewards"], row["category"]) == (text, rewards, category), number
        assert row["ground_truth"] == problem.ground_truth and row["finish_reason"] == "stop" and not row["error"]
        assert row["prompt"] == [{"role": "user", "content": R1_ZERO_PROMPT.replace("{question}", problem.prompt)}]


def test_gsm8k_end_to_end_with_known_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = write_gsm8k(tmp_path / "test.jsonl", 32)
    stub = Stub(problems, delay_seconds=0.2)
    options = ["--task", "gsm8k", "--file", str(tmp_path / "test.jsonl"), "--prompt", "r1_zero", "--reward", "r1_zero"]
    with run_stub(stub) as url:
        assert main(["evaluate", "--model", url, *options, "--out", str(tmp_path / "out")]) == 0
        shown = capsys.readouterr().out
        assert main(["evaluate", "--model", url, *options, "--out", str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out == shown and len(stub.requests) == 32, "nothing is asked twice"
        assert main(["evaluate", "--model", url, *options, "--out", str(tmp_path / "out"), "--shots", "1"]) == 2
        assert "name one with --examples" in capsys.readouterr().err
    check_known_outputs(read_rows(tmp_path / "out" / "responses.jsonl"), problems)
    assert stub.requests[0].keys() == {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert (stub.requests[0]["model"], stub.requests[0]["temperature"]) == ("known", 0.0)
    # 14 of 32 are right: numbers 0, 1, 5, 6, …, 30, 31. By hand: (14 + 1.92073) / 35.84146 ± 0.16454.
    assert "accuracy            43.8 % [28.2, 60.7], the 95 % interval" in shown
    assert "reward              0.438  (format 0.625, answer 0.438)" in shown
    assert [line.split() for line in shown.splitlines() if "right" in line or "wrong" in line] == [
        ["right", "14"],
        ["wrong", "answer", "6"],
        ["wrong", "format", "12"],
    ]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["summary"]["categories"] == {"right": 14, "wrong answer": 6, "wrong format": 12}
    assert [row["index"] for row in summary["examples"]["wrong answer"]] == [2, 7, 12]


def test_damaged_rows_of_the_examples_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = write_gsm8k(tmp_path / "test.jsonl", 1)
    rows = [{"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": "#### two"}]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = r1_zero(tmp_path / "test.jsonl", shots=1, examples=str(tmp_path / "examples.jsonl"))
    stub = Stub(problems)
    stub.models = []
    with run_stub(stub) as url, pytest.raises(UserError, match="Name the model"):
        evaluate_model(url, config, "", out=str(tmp_path))
    assert "1 damaged row was skipped: " in caplog.text
    assert "examples.jsonl, line 2: the final answer 'two' is no number" in caplog.text


def test_a_summary_that_cannot_be_written_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub(write_gsm8k(tmp_path / "test.jsonl", 1))
    (tmp_path / "out" / "summary.json").mkdir(parents=True)
    options = ["--task", "gsm8k", "--file", str(tmp_path / "test.jsonl"), "--prompt", "r1_zero", "--reward", "r1_zero"]
    with run_stub(stub) as url:
        assert main(["evaluate", "--model", url, *options, "--out", str(tmp_path / "out")]) == 2
    assert "summary.json cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_gsm8k_with_known_outputs(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "gsm8k_test.jsonl.xz"
    problems = load_task("gsm8k", [str(file)]).problems
    stub = Stub(problems)
    with run_stub(stub) as url:
        result = evaluate_model(url, r1_zero(file), str(tmp_path), out=str(tmp_path))
    check_known_outputs(read_rows(result.responses), problems)
    assert result.summary.problems == len(stub.requests) == 1319
    # 1,319 = 263 · 5 + 4: 264 numbers are 0, 1, 2 or 3 modulo 5, and 263 are 4.
    assert result.summary.categories == {"right": 528, "wrong answer": 264, "wrong format": 527}
    assert (result.summary.reward, result.summary.format_reward) == (528 / 1319, 792 / 1319)


def test_a_refused_prompt_is_asked_again_by_the_next_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = write_gsm8k(tmp_path / "test.jsonl", 6)
    stub = Stub(problems)
    stub.refused = {list(stub.outputs)[2]}
    with run_stub(stub) as url:
        arguments: dict[str, Any] = {"config": r1_zero(tmp_path / "test.jsonl"), "root": "", "out": str(tmp_path)}
        with pytest.raises(UserError, match=r"1 of 6 requests failed, and would fail again: problem 2: status 400"):
            evaluate_model(url, **arguments)
        assert "Problem 2 has no response: status 400: too long" in caplog.text
        stub.refused, stub.requests = set(), []
        result = evaluate_model(url, **arguments)
        assert len(stub.requests) == 1
        with pytest.raises(UserError, match=r"temperature was 0\.0 and is now 0\.5"):
            evaluate_model(url, **arguments | {"config": r1_zero(tmp_path / "test.jsonl", temperature=0.5)})
        with pytest.raises(UserError, match=r"model was 'known of http://.*' and is now 'other of"):
            evaluate_model(url, **arguments, model_name="other")
        with pytest.raises(UserError, match="cannot be quantized here"):
            evaluate_model(url, **arguments, quantization="int8")
        check_known_outputs(read_rows(result.responses), problems)
        other = EvaluationConfig(task="gsm8k", file=str(tmp_path / "test.jsonl"), prompt="r1_zero")
        assert evaluate_model(url, **arguments | {"config": other}).summary.accuracy == 5 / 6  # the last number counts
        assert len(stub.requests) == 1
        assert evaluate_model(url, **arguments) == result
    check_known_outputs(read_rows(result.responses), problems)


def test_a_failure_that_may_pass_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_FIRST_DELAY_SECONDS", 0.001)
    stub = Stub(write_gsm8k(tmp_path / "test.jsonl", 6))
    stub.refused, stub.refusal = {list(stub.outputs)[2]}, 500
    message = r"1 of 6 problems have no response\. Run the same command again"
    with run_stub(stub) as url, pytest.raises(UserError, match=message):
        evaluate_model(url, r1_zero(tmp_path / "test.jsonl"), "", out=str(tmp_path))


def test_a_server_that_refuses_each_problem_is_given_up(tmp_path: Path) -> None:
    stub = Stub(write_gsm8k(tmp_path / "test.jsonl", 200))
    stub.refused = set(stub.outputs)
    with run_stub(stub) as url, pytest.raises(UserError, match="refuses all requests: status 400: too long"):
        evaluate_model(url, r1_zero(tmp_path / "test.jsonl"), "", out=str(tmp_path))
    assert 20 <= len(stub.requests) <= 20 + 100


@pytest.mark.parametrize("ending", ["/v1", "/v1/completions", "/v1/chat/completions"])
def test_the_url_of_an_endpoint_names_its_server(tmp_path: Path, ending: str) -> None:
    with run_stub(Stub(write_gsm8k(tmp_path / "test.jsonl", 1))) as url:
        result = evaluate_model(f"{url}{ending}", r1_zero(tmp_path / "test.jsonl"), "", out=str(tmp_path))
    assert result.summary.accuracy == 1.0 and result.model.startswith("known of ")


def test_the_name_of_the_model_at_a_url(tmp_path: Path) -> None:
    problems = write_gsm8k(tmp_path / "test.jsonl", 2)
    stub = Stub(problems)
    with run_stub(stub) as url:
        config = r1_zero(tmp_path / "test.jsonl")
        for stub.models, listed in ((["b", "a"], "a, b"), ([], "none")):
            with pytest.raises(
                UserError, match=f"Name the model of {url} with --model_name; the server lists: {listed}"
            ):
                evaluate_model(url, config, "", out=str(tmp_path))
            name = f"named-{len(stub.models)}"
            result = evaluate_model(url, config, "", model_name=name, out=str(tmp_path / name))
            assert stub.requests[-1]["model"] == name and result.model == f"{name} of {url}"


def test_a_server_that_lists_its_models_for_a_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    stub = Stub(write_gsm8k(tmp_path / "test.jsonl", 1))
    stub.list_status = 401
    config = r1_zero(tmp_path / "test.jsonl")
    with run_stub(stub) as url:
        with pytest.raises(UserError, match=r"answers with status 401: .* OPENAI_API_KEY has the right key"):
            evaluate_model(url, config, "", out=str(tmp_path))
        assert evaluate_model(url, config, "", model_name="known", out=str(tmp_path)).summary.accuracy == 1.0


def test_a_url_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        evaluate_model("http://127.0.0.1:9", EvaluationConfig(task="addition"), "", out=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("max_new_tokens", [16, 100, 512], ids=lambda number: f"{number} new tokens")
@pytest.mark.parametrize("tokenizer", [PLAIN, add_chat_tokens(PLAIN)], ids=["no template", "template"])
def test_a_directory_and_our_server_give_the_same_responses(
    tmp_path: Path, tokenizer: Tokenizer, max_new_tokens: int
) -> None:
    """The context is 128: a response ends there, whatever the maximum is."""
    model = make_model(tokenizer.size, 128).eval()
    save_hugging_face(model, tokenizer, tmp_path / "llama")
    root = str(tmp_path / "root")
    config = EvaluationConfig(task="addition:1-2", count=12, shots=1, max_new_tokens=max_new_tokens)
    here = evaluate_model(str(tmp_path / "llama"), config, root, "cpu", out=str(tmp_path / "here"))
    with serve_app(build_app(model, tokenizer, "textmill", 4)) as url:
        there = evaluate_model(f"{url}/v1", config, root, out=str(tmp_path / "there"))
    assert read_rows(here.responses) == read_rows(there.responses)
    assert here.summary == there.summary and here.summary.problems == 12
    rows = read_rows(here.responses)
    assert len({row["response"] for row in rows}) > 6
    assert all(isinstance(row["prompt"], str) == (tokenizer is PLAIN) for row in rows)


def test_a_served_model_is_known_by_its_id_and_its_aliases() -> None:
    """An alias has the identity of the model too, so that the responses of two models are never mixed."""
    model = make_model(PLAIN.size, 128).eval()
    with serve_app(build_app(model, PLAIN, "my-run", 4, identity="0123")) as url:
        listed, named = EndpointModel(url, ""), EndpointModel(url, "textmill")
    assert (listed.name, listed.identity) == (f"my-run of {url}", f"my-run of {url} 0123")
    assert (named.name, named.identity) == (f"textmill of {url}", f"textmill of {url} 0123")
    assert not listed.has_chat_template and not named.has_chat_template


@pytest.mark.parametrize("aliases", [None, "b", 5, [5], {"b": 1}], ids=str)
def test_aliases_of_another_form_are_ignored(monkeypatch: pytest.MonkeyPatch, aliases: Any) -> None:
    entry = {"id": "a", "aliases": aliases, "identity": "1"}
    monkeypatch.setattr(chat_client.ChatClient, "list_models", lambda _: [entry])
    assert EndpointModel("http://127.0.0.1:1", "b").identity == "b of http://127.0.0.1:1"


def test_a_model_with_a_template_can_continue_text(tmp_path: Path) -> None:
    tokenizer = add_chat_tokens(PLAIN)
    save_hugging_face(make_model(tokenizer.size, 128).eval(), tokenizer, tmp_path / "llama")
    config = EvaluationConfig(task="addition", count=2, prompt="Q: {question}", is_plain=True, max_new_tokens=4)
    result = evaluate_model(str(tmp_path / "llama"), config, str(tmp_path), "cpu", out=str(tmp_path / "out"))
    prompts = [f"Q: {problem.prompt}" for problem in load_task("addition", count=2).problems]
    assert [row["prompt"] for row in read_rows(result.responses)] == prompts
