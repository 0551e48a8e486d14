"""Responses that cancel their generations if the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lm.inference.scheduler import Scheduler
from textmill.server.responses import GenerationResponse

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status code; nobody receives it."""


class EventStream(StreamingResponse):
    """Streams the events of a response."""

    def __init__(self, events: AsyncIterator[str], response: GenerationResponse, scheduler: Scheduler) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._response, self._scheduler = response, scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel(self._response, self._scheduler)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``; None, after it is cancelled, if the client disconnects before."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        result.cancel()
        disconnect.cancel()


def cancel(response: GenerationResponse, scheduler: Scheduler) -> None:
    """Cancel the generations of a response."""
    for choice in response.choices:
        scheduler.cancel(choice.generation)
