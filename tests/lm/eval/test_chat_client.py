"""The client of chat models behind a URL: retries, limits, and messages."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.eval import chat_client
from lm.eval.chat_client import ChatAnswer, ChatClient, ChatFailure, ChatRequest
from tests.helpers.chat_endpoint import Asked, ChatEndpoint, Reply, completion, serve_chat
from tests.helpers.examples import examples

KEY = "sk-secret/123"
FAILURES = [
    Reply(status=500, body=b"<html>oops"),
    Reply(status=503, headers={"Retry-After": "0.01"}),
    Reply(status=429, headers={"Retry-After": "0.01"}, body=b'{"error": {"message": "slow down"}}'),
    Reply(status=429),
    Reply(status=408),
    Reply(status=None),
    Reply(body=b'{"choices": [{"message": {"conte'),
    Reply(body=b'{"error": "overloaded"}'),
    Reply(body=completion("cut")[:-9], headers={"Content-Length": "9999", "Connection": "close"}),
]


@pytest.fixture(autouse=True, scope="module")
def _short_delays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_client, "_FIRST_DELAY_SECONDS", 0.001)
        yield


def echo(asked: Asked, attempt: int) -> Reply:
    return Reply(completion(f"to {asked.prompt}"))


def chat_request(text: str, **settings: Any) -> ChatRequest:
    return ChatRequest([Message(role="user", content=text)], **settings)


def ask(endpoint: ChatEndpoint, *prompts: str, **options: Any) -> dict[str, ChatAnswer | ChatFailure]:
    """Return the answers by prompt."""
    answers = list(ChatClient(endpoint.url, "tiny", **options).answers(map(chat_request, prompts)))
    assert sorted(index for index, _ in answers) == list(range(len(prompts)))
    return {prompts[index]: answer for index, answer in answers}


@examples(40)
@given(st.lists(st.lists(st.sampled_from(FAILURES), max_size=3), min_size=1, max_size=12), st.integers(1, 6))
def test_no_prompt_is_lost_whatever_fails(plans: list[list[Reply]], max_in_flight: int) -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        plan = plans[int(asked.prompt)]
        return plan[attempt] if attempt < len(plan) else echo(asked, attempt)

    prompts = [str(number) for number in range(len(plans))]
    with serve_chat(reply) as endpoint:
        answers = ask(endpoint, *prompts, max_in_flight=max_in_flight, max_retries=3)
    assert answers == {prompt: ChatAnswer(f"to {prompt}", "stop", 5, 3) for prompt in prompts}
    assert Counter(endpoint.prompts) == {prompt: len(plan) + 1 for prompt, plan in zip(prompts, plans, strict=True)}
    assert endpoint.max_in_flight <= max_in_flight


@pytest.mark.parametrize("failure", [failure for failure in FAILURES if failure.status != 429])
def test_a_prompt_fails_after_its_retries_and_the_others_go_on(failure: Reply) -> None:
    with serve_chat(lambda asked, attempt: failure if asked.prompt == "bad" else echo(asked, attempt)) as endpoint:
        answers = ask(endpoint, "a", "bad", "b", max_retries=2, max_in_flight=1)
    assert isinstance(answers["bad"], ChatFailure)
    assert endpoint.prompts == ["a", "bad", "bad", "bad", "b"]
    assert answers.keys() - {"bad"} == {prompt for prompt, answer in answers.items() if isinstance(answer, ChatAnswer)}


def test_rate_limits_do_not_count_while_others_are_answered() -> None:
    arrivals = threading.Condition()

    def reply(asked: Asked, attempt: int) -> Reply:
        with arrivals:
            arrivals.notify_all()
            if asked.prompt == "limited" and attempt < 5:
                count = len(endpoint.requests)  # after two more requests, the client has read an answer
                assert arrivals.wait_for(lambda: len(endpoint.requests) >= count + 2, 30)
                return Reply(status=429)
        return echo(asked, attempt)

    with serve_chat(reply) as endpoint:
        answers = ask(endpoint, "limited", *map(str, range(60)), max_retries=0, max_in_flight=2)
    assert not [answer for answer in answers.values() if isinstance(answer, ChatFailure)]
    assert endpoint.prompts.count("limited") == 6


def test_rate_limits_count_if_nothing_is_answered() -> None:
    limited = Reply(status=429, body=b'{"error": {"message": "no credit left"}}')
    with serve_chat(lambda *_: limited) as endpoint:
        assert ask(endpoint, "a", max_retries=3) == {"a": ChatFailure("status 429: no credit left")}
    assert len(endpoint.requests) == 4


def test_retry_after_pauses_all_requests() -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        is_first = asked is endpoint.requests[0]
        return Reply(status=503, headers={"Retry-After": "0.4"}) if is_first else echo(asked, attempt)

    with serve_chat(reply) as endpoint:
        ask(endpoint, "a", "b", max_in_flight=1)
    assert endpoint.prompts == ["a", "a", "b"]
    assert endpoint.requests[1].time - endpoint.requests[0].time >= 0.4


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("0.25", 0.25, 0.25),
        (format_datetime(datetime.now(UTC) + timedelta(seconds=900), usegmt=True), 1, 900),
        (format_datetime(datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=900)), 1, 900),
        (format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True), 0, 0),
        ("999999999", 3600, 3600),
        ("9" * 400, 0, 0),
        *((text, 0, 0) for text in ("", "-5", "soon", "nan", "1e9", "Mon, 99 Nov 2026 00:00:00 GMT")),
        (f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT", 0, 0),
        (f"Mon, 01 Jan 2029 00:00:00 +{'9' * 18}", 0, 0),
    ],
    ids=lambda value: "",  # the dates differ between the processes that collect the tests
)
def test_retry_after_is_seconds_or_a_date(header: str, low: float, high: float) -> None:
    response = httpx.Response(429, headers={"Retry-After": header})
    assert low <= chat_client._retry_after_seconds(response) <= high


def test_backoff_doubles_up_to_a_limit() -> None:
    for attempts in (1, 2, 5, 100):
        longest = min(0.001 * 2 ** (attempts - 1), 60)
        assert all(longest / 2 <= chat_client._backoff_seconds(attempts) <= longest for _ in range(20))


def test_a_refused_prompt_fails_without_a_retry() -> None:
    too_long = Reply(status=400, body=b'{"error": {"message": "too long\\u001b[2J by\\n9 tokens"}}')
    with serve_chat(lambda asked, attempt: too_long if asked.prompt == "long" else echo(asked, attempt)) as endpoint:
        answers = ask(endpoint, "long", "short")
    assert answers["long"] == ChatFailure("status 400: too long [2J by 9 tokens", is_refused=True)
    assert isinstance(answers["short"], ChatAnswer)
    assert sorted(endpoint.prompts) == ["long", "short"]


UNREADABLE = [
    completion([{"type": "text", "text": 5}]),
    completion(None).replace(b'"content": null', b'"reasoning_content": "a"'),
    completion("a", choices=[]),
]


@pytest.mark.parametrize("body", UNREADABLE, ids=["parts", "left out", "no choices"])
def test_an_answer_that_cannot_be_read_is_not_paid_for_again(body: bytes) -> None:
    bad = Reply(body=body)
    with serve_chat(lambda asked, attempt: bad if asked.prompt == "bad" else echo(asked, attempt)) as endpoint:
        answers = ask(endpoint, "a", "bad", "b", max_in_flight=1)
    failure = answers["bad"]
    assert isinstance(failure, ChatFailure) and failure.is_malformed and not failure.is_refused
    assert failure.error.startswith("the answer is malformed; status 200: {") and failure.tokens == 8
    assert endpoint.prompts == ["a", "bad", "b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "requests", "message"),
    [
        *(
            (Reply(body=body), 20, "No answer of the server can be read: the answer is malformed")
            for body in UNREADABLE
        ),
        (Reply(body=b"<html>a page"), 60, "No answer of the server can be read: .* <html>a page. Check the URL"),
        (Reply(status=422, body=b'{"detail": "no"}'), 20, "refuses all requests: status 422: no. Check the settings"),
    ],
    ids=["parts", "left out", "no choices", "page", "refused"],
)
def test_a_server_without_a_good_answer_is_given_up(reply: Reply, requests: int, message: str) -> None:
    prompts = [str(number) for number in range(50)]
    with serve_chat(lambda *_: reply) as endpoint, pytest.raises(UserError, match=message):
        ask(endpoint, *prompts, max_in_flight=1, max_retries=2)
    assert len(endpoint.requests) == requests
    with serve_chat(lambda asked, attempt: echo(asked, attempt) if asked.prompt == "10" else reply) as endpoint:
        answers = ask(endpoint, *prompts, max_in_flight=1, max_retries=0)
    assert [prompt for prompt, answer in answers.items() if isinstance(answer, ChatAnswer)] == ["10"]


def test_a_request_beyond_the_context_is_repeated_with_the_tokens_that_fit() -> None:
    def reply(asked: Asked, attempt: int) -> Reply:
        error = {"message": "too long", "code": "context_length_exceeded", "max_tokens": 30}
        is_too_long = asked.body["max_tokens"] > (30 if asked.prompt == "fits" else 20)
        return Reply(status=400, body=json.dumps({"error": error}).encode()) if is_too_long else echo(asked, attempt)

    with serve_chat(reply) as endpoint:
        requests = [chat_request(text, max_tokens=100) for text in ("fits", "never")]
        answers = dict(ChatClient(endpoint.url, "tiny", max_in_flight=1).answers(requests))
    assert answers == {0: ChatAnswer("to fits", "stop", 5, 3), 1: ChatFailure("status 400: too long", is_refused=True)}
    assert [(asked.prompt, asked.body["max_tokens"]) for asked in endpoint.requests] == [
        ("fits", 100), ("fits", 30), ("never", 100), ("never", 30),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            401,
            {"error": {"message": f"The key {KEY} is wrong."}},
            "status 401: The key … is wrong. Check that .* MY_KEY",
        ),
        (
            403,
            {"detail": "no access"},
            "status 403: no access. Check that the environment variable MY_KEY has the right",
        ),
        (
            404,
            {"message": "no model tiny"},
            "status 404: no model tiny. Check the URL and the name of the model, 'tiny'",
        ),
        (302, {}, "status 302: {}. Check the URL"),
    ],
)
def test_a_server_that_refuses_all_requests_is_a_user_error(
    status: int, body: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    reply = Reply(status=status, body=json.dumps(body).encode())
    with serve_chat(lambda *_: reply) as endpoint, pytest.raises(UserError, match=message) as error:
        ask(endpoint, *map(str, range(50)), max_in_flight=4, api_key_variable="MY_KEY")
    assert KEY not in str(error.value)
    assert len(endpoint.requests) <= 4


def test_the_answers_before_such_an_error_are_yielded() -> None:
    with serve_chat(
        lambda asked, attempt: Reply(status=401) if asked.prompt == "b" else echo(asked, attempt)
    ) as endpoint:
        answers = ChatClient(endpoint.url, "tiny", max_in_flight=1).answers(map(chat_request, "abc"))
        assert next(answers)[0] == 0
        with pytest.raises(UserError, match="401"):
            next(answers)


@pytest.mark.parametrize("key", [None, KEY, f" {KEY}\n"])
def test_only_given_settings_and_a_given_key_are_sent(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if key:
        monkeypatch.setenv("MY_KEY", key)
    messages = [Message(role="system", content="Be kind."), Message(role="user", content="é")]
    with serve_chat(echo) as endpoint:
        client = ChatClient(endpoint.url, "tiny", "MY_KEY")
        list(client.answers([ChatRequest([Message(**messages[0], weight=0), messages[1]])]))
        list(client.answers([ChatRequest(messages, temperature=0.0, top_p=0.5, max_tokens=7, seed=0)]))
    bodies = [asked.body for asked in endpoint.requests]
    assert bodies[0] == {"model": "tiny", "messages": messages}
    assert bodies[1] == {**bodies[0], "temperature": 0.0, "top_p": 0.5, "max_tokens": 7, "seed": 0}
    assert endpoint.requests[0].headers.get("Authorization") == (f"Bearer {KEY}" if key else None)


@pytest.mark.parametrize("key", ["sk-\nInjected: header", "sk-é", "two words"])
def test_a_key_with_impossible_characters_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(UserError, match="MY_KEY has characters that no key has") as error:
        ChatClient("http://127.0.0.1:1", "tiny", "MY_KEY")
    assert key not in str(error.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("https://h/api/openai", "https://h/api/openai/chat/completions"),
        ("http://h:1/v1/completions", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/models/", "http://h:1/v1/chat/completions"),
        ("https://h/v1/chat/completions?api-version=3", "https://h/v1/chat/completions?api-version=3"),
    ],
)
def test_the_path_of_the_url(url: str, expected: str) -> None:
    assert ChatClient(url, "tiny").url == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not the URL of a server"),
        ("localhost:8000", "not the URL of a server"),
        ("ftp://h", "not the URL of a server"),
        ("http://", "not the URL of a server"),
        ("http://h:port", "cannot be used"),
        *((url, f"'{url}' is not the URL of a server") for url in ("http://a..b", "http://xn--a", "http://h:99999")),
        ("http://me:secret@h", "Put the key in an environment variable"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        ChatClient(url, "tiny")
    assert "secret" not in str(error.value)


def test_a_server_that_is_not_there_is_named_at_once() -> None:
    endpoint = ChatEndpoint(echo)
    endpoint.start()
    endpoint.stop()
    with pytest.raises(UserError, match=rf"{endpoint.url}/v1/chat/completions cannot be reached"):
        ask(endpoint, "a", "b")


def test_a_server_that_goes_away_is_waited_for() -> None:
    with serve_chat(
        lambda asked, attempt: Reply(echo(asked, attempt).body, headers={"Connection": "close"})
    ) as endpoint:
        answers = ChatClient(endpoint.url, "tiny", max_in_flight=1, max_retries=2).answers(map(chat_request, "ab"))
        assert isinstance(next(answers)[1], ChatAnswer)
        endpoint._server.socket.close()
        ((index, failure),) = answers
        assert index == 1
        assert isinstance(failure, ChatFailure)
        assert "no connection" in failure.error


def test_an_answer_that_takes_too_long_is_asked_again() -> None:
    with serve_chat(lambda asked, attempt: Reply(echo(asked, attempt).body, delay=0 if attempt else 60)) as endpoint:
        answers = ask(endpoint, "a", timeout_seconds=0.3)
    assert isinstance(answers["a"], ChatAnswer)
    assert len(endpoint.requests) == 2


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_MAX_BODY_BYTES", 1 << 20)
    with serve_chat(lambda *_: Reply(completion("x" * (2 << 20)))) as endpoint:
        assert ask(endpoint, "a", max_retries=0) == {"a": ChatFailure("the answer has more than 1 MiB")}


def test_requests_are_read_as_they_are_sent_and_closing_stops_them() -> None:
    taken: list[int] = []

    def requests() -> Iterator[ChatRequest]:
        for number in range(1000):
            taken.append(number)
            yield chat_request(str(number))

    with serve_chat(
        lambda asked, attempt: Reply(echo(asked, attempt).body, delay=int(asked.prompt) * 0.01)
    ) as endpoint:
        answers = ChatClient(endpoint.url, "tiny", max_in_flight=4).answers(requests())
        for count in range(1, 8):
            next(answers)
            assert len(taken) <= count + 4
        answers.close()  # type: ignore[attr-defined]
    assert len(endpoint.requests) <= 11
