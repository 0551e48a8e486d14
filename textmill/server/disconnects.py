"""Responses that cancel their generations if the client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lm.inference.scheduler import Scheduler
from textmill.server.responses import GenerationResponse

CLIENT_CLOSED_REQUEST = 499
"""nginx's status code; nobody receives it."""


class EventStream(StreamingResponse):
    """Streams events, and cancels the generation if the client disconnects."""

    def __init__(self, response: GenerationResponse, scheduler: Scheduler) -> None:
        super().__init__(response.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._response, self._scheduler = response, scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel(self._response, self._scheduler)


async def until_disconnect(request: Request, response: Coroutine[Any, Any, Response]) -> Response:
    """Return the response, or cancel the coroutine that makes it if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    whole, disconnect = asyncio.ensure_future(response), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({whole, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return whole.result() if whole.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        whole.cancel()
        disconnect.cancel()


def cancel(response: GenerationResponse, scheduler: Scheduler) -> None:
    """End the generations of a response."""
    for choice in response.choices:
        scheduler.cancel(choice.generation)
