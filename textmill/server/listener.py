"""``textmill serve``: listens at an address, and serves a model there until Ctrl-C."""

import asyncio
import hashlib
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import uvicorn

from lm.common.errors import UserError
from lm.hardware.device import explain_out_of_memory
from lm.inference.config import Pooling, Quantization
from lm.inference.scheduler import Scheduler
from tasks.runs.models import DirectoryModel, ResolvedModel
from textmill.server.access import RequestTimeout, parse_origin
from textmill.server.app import ALIAS, build_app
from textmill.server.kv_memory import describe_kv_memory, free_bytes

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5  # time for open responses when the server stops


def serve(
    resolved: ResolvedModel,
    host: str,
    port: int,
    device: str,
    quantization: Quantization = "none",
    api_key: str | None = None,
    served_model_name: str = "",
    allowed_origins: Sequence[str] = (),
    adapters: Mapping[str, DirectoryModel] | None = None,
    pooling: Pooling = "last",
    kv_bytes: int | None = None,
    max_context: int | None = None,
    **options: int,
) -> None:
    """Serve a model until Ctrl-C.

    ``served_model_name`` is the model's name for clients, by default that of the run or the directory. Keys and values
    take at most ``kv_bytes``, by default half of the memory that is free when the model is loaded. ``max_context`` and
    ``options`` are arguments of :func:`build_app`. Raises UserError for invalid arguments and an address in use.
    """
    adapters = adapters or {}
    for option, given in (("served_model_name", served_model_name), *(("adapters", given) for given in adapters)):
        if not given.isprintable() or given.strip() != given:
            raise UserError(f"--{option} must be printable text without spaces around it.")
    origins = [*dict.fromkeys(map(parse_origin, allowed_origins))]
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UserError("The API key must be printable ASCII text without spaces around it, and not empty.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Cannot listen on {host}, port {port}: {str(error).rstrip('.')}. Change --host or --port."
        ) from None
    with listener, suppress(KeyboardInterrupt):
        address, port, *_ = listener.getsockname()
        ip_address = ipaddress.ip_address(address)
        is_private = api_key is None and ip_address.is_loopback
        found_name = resolved.public_name if resolved.public_name.isprintable() else ""
        name = served_model_name or found_name or ALIAS
        if taken := adapters.keys() & {name, ALIAS}:
            raise UserError(f"--adapters: {min(taken)} is the name of the base; choose another one for the adapter.")
        directories = {name: adapter.directory for name, adapter in adapters.items()}
        model, tokenizer = resolved.load_for_inference(device, quantization, directories)

        def identify(*models: ResolvedModel) -> str:
            # Hashed: it may hold the path of a directory, which is not for clients.
            text = " ".join([*(model.identify() for model in models), quantization])
            return hashlib.sha256(text.encode()).hexdigest()[:16]

        with explain_out_of_memory("The KV cache does not fit into memory; lower --kv_memory."):
            app = build_app(
                model,
                tokenizer,
                name,
                api_key=api_key,
                identity=identify(resolved),
                adapters={name: identify(resolved, adapter) for name, adapter in adapters.items()},
                is_private=is_private,
                is_post_trained=resolved.is_post_trained,
                allowed_origins=origins,
                pooling=pooling,
                max_context=max_context,
                kv_bytes=free_bytes(model) // 2 if kv_bytes is None else kv_bytes,
                **options,
            )
        if api_key is None and not is_private:
            log.warning(
                "Everyone who can reach this machine can use the model, because there is no API key. Set --api_key, or "
                "leave out --host."
            )
        if ip_address.is_unspecified:  # all addresses: a browser cannot open 0.0.0.0 or ::
            host = "127.0.0.1" if ip_address.version == 4 else "::1"
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        place = f"{url}/v1 and on all other addresses of this machine" if ip_address.is_unspecified else f"{url}/v1"
        print(f"Serving {found_name or resolved.name} on {place}. Ctrl-C stops the server.", flush=True)
        print(f"Model name for clients: {name}", flush=True)
        if adapters:
            print(f"With adapters: {', '.join(adapters)}", flush=True)
        print(f"Page to try it: {url}/", flush=True)
        print(describe_kv_memory(app.state.scheduler, max_context or model.config.context_length), flush=True)
        config = uvicorn.Config(
            app, http=RequestTimeout, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS + 2
        )
        _Server(config, app.state.scheduler).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends open responses by an error that clients understand, before uvicorn cancels them."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def close() -> None:
            await asyncio.sleep(_SHUTDOWN_SECONDS)
            await asyncio.to_thread(self._scheduler.close)

        closing = asyncio.create_task(close())
        await super().shutdown(sockets)
        closing.cancel()
