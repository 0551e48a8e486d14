"""A time limit for the arrival of a request, so that half-sent requests do not stay open."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_ARRIVAL_SECONDS = 30.0  # for the headers, and again for the body
_TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class RequestTimeout(H11Protocol):
    """uvicorn's HTTP protocol, which closes a connection if the headers or the body take more than 30 seconds.

    uvicorn itself limits only the time between two requests. The answer is 408, unless the request has one already.
    """

    _timer: asyncio.TimerHandle | None = None
    _timed_cycle: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first headers."""
        super().connection_made(transport)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived, and start or stop the time of the next part."""
        super().handle_events()
        self._update_timer()

    def _update_timer(self) -> None:
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_arriving or self._timed_cycle is not self.cycle:  # the headers of a request make a cycle
            self._stop_timer()
        if is_arriving and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(_ARRIVAL_SECONDS, self._close)
            self._timed_cycle = self.cycle

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        has_response = self.conn.their_state is h11.SEND_BODY and self.cycle.response_started
        if not has_response and not self.transport.is_closing():
            self.transport.write(_TIMEOUT_RESPONSE)
        self.transport.close()
