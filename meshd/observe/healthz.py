"""`/healthz` over HTTP: for service managers, containers and monitors that cannot speak gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from meshd.errors import ResourceError
from meshd.observe.health import Health


@asynccontextmanager
async def serve_health(host: str, port: int, health: Callable[[], Health]) -> AsyncIterator[str]:
    """Answer `GET /healthz` on `host`:`port` (0: a free port) while the block runs; the URL.

    200 when healthy, 503 when not, each with one line of JSON: {"healthy": ..., "why": ...}. health: called on the
    event loop at every request; must not block. Raises ResourceError when the port cannot be had.
    """

    async def answer(request: web.Request) -> web.Response:
        now = health()
        body = json.dumps({"healthy": now.ok, "why": now.why}, ensure_ascii=False) + "\n"
        return web.Response(status=200 if now.ok else 503, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {host} port {port} (http_port): {error.strerror}. "
                'Fix: http_port = another port, 0 for a free one, or "off"'
            ) from error
        bound = runner.addresses[0][1]
        yield f"http://[{host}]:{bound}/healthz" if ":" in host else f"http://{host}:{bound}/healthz"
    finally:
        await runner.cleanup()
