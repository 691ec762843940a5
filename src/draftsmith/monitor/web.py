"""`draftsmith watch RUN ... --web PORT`: runs as a page. It only reads, it only answers GET, and it needs
nothing from elsewhere. On another address than this machine's own it asks for a token.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.core import UserError
from draftsmith.monitor.history import History

EVERY_S = 1.0
COOKIE = "draftsmith_token"
TOKEN = "DRAFTSMITH_TOKEN"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(roots: list[Path], *, host: str, port: int) -> None:
    """Until Ctrl-C. The token for another host than this one is DRAFTSMITH_TOKEN's, or a new one."""
    uvicorn, build = _needed()
    own = is_loopback(host)
    token = None if own else os.environ.get(TOKEN) or secrets.token_urlsafe(16)
    listening = _listen(host, port)
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    at = f"http://{name if ':' not in name else f'[{name}]'}:{listening.getsockname()[1]}/"
    print(f"{at}{'' if token is None else f'?token={token}'}", flush=True)
    config = uvicorn.Config(
        build(roots, token), log_level="warning", timeout_graceful_shutdown=1, server_header=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def _needed() -> tuple[Any, Any]:
    try:
        import starlette  # noqa: F401
        import uvicorn

        return uvicorn, app
    except ImportError as error:
        raise UserError(
            where="watch --web",
            found=f"no package {error.name}",
            expected="starlette and uvicorn",
            remedy="pip install 'draftsmith[web]'",
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # the address is printed next
    except OSError as error:
        raise UserError(
            where=f"watch --web {port}",
            found=f"an address that cannot be listened on ({error.strerror or error})",
            expected="a free port of this machine",
            remedy="Take another --web PORT or --host.",
        ) from None
    return listening


def app(roots: list[Path], token: str | None) -> Any:
    """The application: the page, its stream of events, and each run's report."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import (
        FileResponse,
        HTMLResponse,
        PlainTextResponse,
        RedirectResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route

    text = (resources.files("draftsmith") / "monitor" / "page.html").read_text()

    def refused(request: Request) -> Response | None:
        if token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            answer = RedirectResponse(request.url.path, headers=HEADERS)  # out of the address line
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return answer
        if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
            return None
        return PlainTextResponse("the address ends with ?token=...", 401, HEADERS)

    async def page(request: Request) -> Response:
        return refused(request) or HTMLResponse(text, headers=HEADERS)

    async def events(request: Request) -> Response:
        return refused(request) or StreamingResponse(
            stream(roots, request.is_disconnected), media_type="text/event-stream", headers=HEADERS
        )

    async def report(request: Request) -> Response:
        if answer := refused(request):
            return answer
        asked = request.path_params["number"]
        path = dict(enumerate(roots)).get(
            int(asked) if asked.isdecimal() and len(asked) < 9 else -1
        )
        path = None if path is None else path / "eval" / "report.html"
        if path is None or not path.is_file():
            return PlainTextResponse("no report", 404, HEADERS)
        return FileResponse(path, headers=HEADERS)

    # A page elsewhere must not read a run through a name that it points at this machine.
    hosts = ["localhost", "127.0.0.1", "[::1]"] if token is None else ["*"]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/events", events),
            Route("/runs/{number}/report", report),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


async def stream(roots: list[Path], gone: Any) -> AsyncIterator[str]:
    """Server-sent events: all runs each second, their curves only when they have changed."""
    histories, sent = [History(root) for root in roots], [""] * len(roots)
    yield "retry: 2000\n\n"
    while not await gone():
        boards = await asyncio.to_thread(lambda: [history.board() for history in histories])
        for number, board in enumerate(boards):
            curves = json.dumps(board["curves"])
            if curves == sent[number]:
                del board["curves"]
            sent[number] = curves
        yield f"data: {json.dumps(boards)}\n\n"
        await asyncio.sleep(EVERY_S)
