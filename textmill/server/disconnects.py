"""Responses that cancel their generations if the client disconnects."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lm.inference.scheduler import Scheduler
from textmill.server.responses import GenerationResponse

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
            _cancel(self._response, self._scheduler)


async def wait_for_response(
    request: Request, response: GenerationResponse, scheduler: Scheduler
) -> dict[str, Any] | None:
    """Return the JSON body of the whole response; None if the client disconnects before."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    whole, disconnect = asyncio.ensure_future(response.whole()), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({whole, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return whole.result() if whole.done() else None
    finally:
        whole.cancel()
        disconnect.cancel()
        _cancel(response, scheduler)


def _cancel(response: GenerationResponse, scheduler: Scheduler) -> None:
    for choice in response.choices:
        scheduler.cancel(choice.generation)
