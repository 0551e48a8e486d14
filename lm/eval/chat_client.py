"""A client of models behind OpenAI's HTTP API: many requests at once, with retries.

Source: https://platform.openai.com/docs/api-reference; ``Retry-After``: RFC 9110, section 10.2.3. The package
``openai`` would not do: it limits no answer's size, and its other requests go on during a ``Retry-After``.
"""

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.text.utf8 import replace_surrogates

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
_FIRST_DELAY_SECONDS = 0.5  # doubles with each retry
_MAX_DELAY_SECONDS = 60.0
_LOGGED_DELAY_SECONDS = 10.0  # the log names longer pauses
_MAX_BODY_BYTES = 64 << 20
_MAX_MESSAGE_CHARACTERS = 300  # of a server's error message
_RATE_LIMITED_STATUS = 429
_REFUSED_KEY_STATUSES = {401, 403}
_MAX_USELESS = 20  # requests that were refused or have a malformed answer, if none has a good one


@dataclass(frozen=True)
class ChatRequest:
    """Messages to answer or a text to continue, and how to sample. None leaves a setting to the server."""

    messages: Sequence[Message] | str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    """Texts that end the answer."""


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the model. The token counts are 0 if the server does not report them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class ChatFailure:
    """Why a request has no answer: the server refused it, its answer is malformed, or the retries are used up."""

    error: str
    is_refused: bool = False
    is_malformed: bool = False
    tokens: int = 0
    """The tokens of malformed answers and their prompts, as the server reports them."""

    @property
    def is_permanent(self) -> bool:
        """Whether the same request would most likely fail again."""
        return self.is_refused or self.is_malformed


class ChatClient:
    """Asks a model for answers, many at once.

    A request is repeated after a lost connection, a time-out, a body that is not an answer, and the statuses 408, 429
    and 5xx, with exponentially growing, random delays. A ``Retry-After`` pauses all requests. An answer in a form that
    the client cannot read was generated and is paid for, so its request is not repeated. If the server says how many
    tokens fit into its context, the request is repeated with this maximum.

    Args:
        url: The server's, e.g. ``http://127.0.0.1:8000``. A path is kept; without one, ``/v1`` is added.
        model: The model's name for the server.
        api_key_variable: The environment variable with the key. It may be unset for a server that needs no key.
        max_in_flight: Number of requests at a time.
        max_retries: Retries of a request. A 429 does not count while other requests are answered.
        timeout_seconds: Time limit of one attempt, until its whole answer has arrived.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_variable: str = "OPENAI_API_KEY",
        max_in_flight: int = 100,
        max_retries: int = 8,
        timeout_seconds: float = 600.0,
    ) -> None:
        if max_in_flight < 1:
            raise UserError(f"The number of requests in flight is {max_in_flight}; it must be at least 1.")
        self.url = _chat_url(url)
        self.model = model
        self._key = _read_key(api_key_variable)
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._key_variable = api_key_variable
        self._max_in_flight = max_in_flight
        self._max_retries = max_retries
        self._timeout_seconds = timeout_seconds
        self._is_server_reached = False
        self._answer_count = 0
        self._resume_time = 0.0  # no request is sent earlier, by the clock of the event loop

    def answers(
        self, requests: Iterable[ChatRequest], has_answers: bool = False
    ) -> Iterator[tuple[int, ChatAnswer | ChatFailure]]:
        """Yield the index and the answer of each request, in the order in which the answers arrive.

        ``requests`` is read only as fast as requests are sent, so it may end early depending on the answers so far. No
        answer is received while the caller works on one. Raises UserError if the server cannot be reached at the
        start, or refuses all requests, e.g. for a wrong key or model name. It also does if 20 requests were refused or
        have a malformed answer, none has a good one, and no earlier request had one (``has_answers``). Do not call it
        from a running event loop.
        """
        indexed_requests = enumerate(requests)
        num_useless = 0
        tasks: dict[asyncio.Task[ChatAnswer | ChatFailure], int] = {}
        http = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),  # the limit of the whole attempt is in _send
            limits=httpx.Limits(max_connections=self._max_in_flight, max_keepalive_connections=self._max_in_flight),
        )
        with asyncio.Runner() as runner:
            try:
                while True:
                    while len(tasks) < self._max_in_flight and (item := next(indexed_requests, None)):
                        tasks[runner.get_loop().create_task(self._ask(http, item[1]))] = item[0]
                    if not tasks:
                        return
                    done, _ = runner.run(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                    ranks = {task: 2 if task.exception() else isinstance(task.result(), ChatFailure) for task in done}
                    for task in sorted(done, key=ranks.__getitem__):  # answers first; last an error, which ends all
                        answer = task.result()
                        has_answers |= isinstance(answer, ChatAnswer)
                        if isinstance(answer, ChatFailure) and answer.is_permanent:
                            num_useless += 1
                            if num_useless >= _MAX_USELESS and not has_answers:
                                raise _no_good_answer(answer)
                        yield tasks.pop(task), answer
            finally:
                runner.run(_cancel(tasks, http))

    def list_models(self) -> list[dict[str, Any]]:
        """Return the server's models, each with its ``id``, or none if it lists none.

        Raises UserError if the server cannot be reached, and without a name of the model, if it refuses the key.
        """
        try:
            response = httpx.get(self._sibling_url("models"), headers=self._headers, timeout=_CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code in _REFUSED_KEY_STATUSES and not self.model:  # some keys are for answers alone
            raise self._refusal(response, response.content)
        match _parse_json(response.content):
            case {"data": [*models]}:
                return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
        return []

    async def _ask(self, http: httpx.AsyncClient, request: ChatRequest) -> ChatAnswer | ChatFailure:
        attempts = failures = tokens = 0
        while True:
            while (seconds := self._resume_time - asyncio.get_running_loop().time()) > 0:  # the server is busy
                await asyncio.sleep(seconds)
            answer_count = self._answer_count
            try:
                answer = await self._send(http, request)
            except _FailedAttemptError as failure:
                attempts += 1
                tokens += failure.tokens
                failures += not (failure.is_rate_limited and self._answer_count > answer_count)
                if not failure.can_retry or failures > self._max_retries:
                    is_refused = not (failure.can_retry or failure.is_malformed)
                    return ChatFailure(failure.message, is_refused, failure.is_malformed, tokens)
                self._pause(failure.retry_after_seconds)
                await asyncio.sleep(_backoff_seconds(attempts))
            else:
                self._answer_count += 1
                return answer

    def _pause(self, seconds: float) -> None:
        resume_time = asyncio.get_running_loop().time() + seconds
        if resume_time - self._resume_time > _LOGGED_DELAY_SECONDS and seconds > _LOGGED_DELAY_SECONDS:
            log.info("The server asks to wait %.0f seconds.", seconds)
        self._resume_time = max(self._resume_time, resume_time)

    async def _send(self, http: httpx.AsyncClient, request: ChatRequest, is_shortened: bool = False) -> ChatAnswer:
        """Return the answer to a request. Raises _FailedAttemptError, or UserError if all requests would fail."""
        names = ("temperature", "top_p", "max_tokens", "seed", "stop")
        settings = {name: value for name in names if (value := getattr(request, name)) is not None}
        payload: dict[str, Any] = {"model": self.model, **settings}
        if isinstance(request.messages, str):
            url, payload["prompt"] = self._sibling_url("completions"), request.messages
        else:
            url = self.url  # servers refuse fields that they do not know, such as weight
            payload["messages"] = [Message(role=part["role"], content=part["content"]) for part in request.messages]
        try:
            async with asyncio.timeout(self._timeout_seconds), http.stream("POST", url, json=payload) as response:
                self._is_server_reached = True
                received = bytearray()
                async for block in response.aiter_bytes():
                    received += block
                    if len(received) > _MAX_BODY_BYTES:
                        raise _FailedAttemptError(f"the answer has more than {_MAX_BODY_BYTES >> 20} MiB")
        except httpx.ConnectError as error:
            if self._is_server_reached:
                raise _FailedAttemptError(f"no connection: {error}") from None
            raise self._unreachable(error) from None
        except TimeoutError:
            raise _FailedAttemptError(f"no answer in {self._timeout_seconds:g} seconds") from None
        except httpx.RequestError as error:
            raise _FailedAttemptError(f"the connection was lost: {str(error) or type(error).__name__}") from None
        body = bytes(received)
        answer = _parse_answer(body) if response.is_success else None
        if answer:
            return answer
        status, message = response.status_code, self._describe(response, body)
        if response.is_success:
            content = _parse_json(body)
            is_paid = isinstance(content, dict) and "choices" in content
            message, tokens = f"the answer is malformed; {message}", sum(_usage_tokens(content))
            raise _FailedAttemptError(message, can_retry=not is_paid, is_malformed=True, tokens=tokens)
        if status in (408, _RATE_LIMITED_STATUS) or status >= 500:
            delay = _retry_after_seconds(response) if status in (_RATE_LIMITED_STATUS, 503) else 0.0
            raise _FailedAttemptError(message, True, status == _RATE_LIMITED_STATUS, delay)
        if status in (400, 413, 422):  # the prompt may be the reason, e.g. if it is too long
            if not is_shortened and (room := _find_room(body, request.max_tokens)):
                return await self._send(http, replace(request, max_tokens=room), is_shortened=True)
            raise _FailedAttemptError(message, can_retry=False)
        raise self._refusal(response, body)

    def _sibling_url(self, name: str) -> str:
        """Return the URL of another endpoint of the server."""
        url = httpx.URL(self.url)
        return str(url.copy_with(path=url.path.removesuffix("chat/completions") + name))

    def _unreachable(self, error: httpx.HTTPError) -> UserError:
        return UserError(f"{self.url} cannot be reached: {error}. Check the URL, and that the server runs.")

    def _refusal(self, response: httpx.Response, body: bytes) -> UserError:
        if response.status_code in _REFUSED_KEY_STATUSES:
            state = "has the right key" if self._key else "is set; now it is empty"
            advice = f"Check that the environment variable {self._key_variable} {state}."
        else:
            advice = f"Check the URL and the name of the model, {self.model!r}."
        return UserError(f"{self.url} answers with {self._describe(response, body).removesuffix('.')}. {advice}")

    def _describe(self, response: httpx.Response, body: bytes) -> str:
        """Return the status and the message of a server's error without the key, which some servers repeat."""
        message = _error_message(body.replace(self._key.encode(), "…".encode()) if self._key else body)
        return f"status {response.status_code}: {message or response.reason_phrase}"


@dataclass(eq=False)
class _FailedAttemptError(Exception):
    message: str
    can_retry: bool = True
    is_rate_limited: bool = False
    retry_after_seconds: float = 0.0
    is_malformed: bool = False
    tokens: int = 0


def _no_good_answer(failure: ChatFailure) -> UserError:
    if failure.is_refused:
        return UserError(f"The server refuses all requests: {failure.error}. Check the settings.")
    return UserError(f"No answer of the server can be read: {failure.error}. Check the URL and the server.")


def _find_room(body: bytes, max_tokens: int | None) -> int | None:
    """Return the most tokens that fit after the prompt, if the server says so and they are fewer than requested."""
    match _parse_json(body):
        case {"error": {"code": "context_length_exceeded", "max_tokens": int(room)}} if 0 < room < (max_tokens or 0):
            return room
    return None


def _chat_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UserError(f"The URL of the model cannot be used: {error}.") from None
    if url.userinfo:
        raise UserError("The URL of the model has a user or a password. Put the key in an environment variable.")
    try:
        host = url.host
        url.raw_host.decode().encode("idna")  # as the request does
    except UnicodeError:
        host = ""
    if url.scheme not in ("http", "https") or not host or not 0 <= (url.port or 0) < 1 << 16:
        raise UserError(f"{text!r} is not the URL of a server; give one such as http://127.0.0.1:8000.")
    path = re.sub(r"/(chat/completions|completions|models)$", "", url.path.rstrip("/")) or "/v1"
    return str(url.copy_with(path=f"{path}/chat/completions"))


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError(f"The environment variable {variable} has characters that no key has. Set it to the key alone.")
    return key


def _parse_answer(body: bytes) -> ChatAnswer | None:
    match _parse_json(body):
        case {"choices": [{"message": {"content": str() | list() | None as content}, **choice}, *_], **rest} | {
            "choices": [{"text": str() as content, **choice}, *_],
            **rest,
        }:
            reason, text = choice.get("finish_reason"), _join_parts(content)
            if text is not None:
                reason = replace_surrogates(reason) if isinstance(reason, str) else None
                return ChatAnswer(replace_surrogates(text), reason, *_usage_tokens(rest))
    return None


def _join_parts(content: str | list[Any] | None) -> str | None:
    """Return the text of an answer, without parts of other types, such as the reasoning; None if a part has no type."""
    if not isinstance(content, list):
        return content or ""
    if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
        return None
    texts = [part.get("text") for part in content if part["type"] == "text"]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _usage_tokens(content: Any) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answer; 0 if the server does not report them."""
    usage = content.get("usage") if isinstance(content, dict) else None
    counts = [usage.get(f"{name}_tokens") if isinstance(usage, dict) else None for name in ("prompt", "completion")]
    prompt, completion = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
    return prompt, completion


def _error_message(body: bytes) -> str:
    """Return the message in a server's error, or else the start of the body, in one printable line."""
    match _parse_json(body):
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)} | {"detail": str(text)}:
            message = text
        case _:
            message = body[: 4 * _MAX_MESSAGE_CHARACTERS].decode(errors="replace")
    line = " ".join("".join(character if character.isprintable() else " " for character in message).split())
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else f"{line[:_MAX_MESSAGE_CHARACTERS]}…"


def _retry_after_seconds(response: httpx.Response) -> float:
    """Return the delay of ``Retry-After``, in seconds or as a date, at most an hour; 0 without a valid one."""
    text = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, OverflowError):  # OverflowError: a year or an offset with many digits
            return 0.0
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), 3600.0)


def _backoff_seconds(attempts: int) -> float:
    longest = min(_FIRST_DELAY_SECONDS * 2.0 ** min(attempts - 1, 30), _MAX_DELAY_SECONDS)
    return random.Random().uniform(0.5, 1.0) * longest  # the seeded generator of the module stays untouched


async def _cancel(tasks: Iterable[asyncio.Task[Any]], http: httpx.AsyncClient) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await http.aclose()
