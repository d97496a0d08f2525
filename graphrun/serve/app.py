"""The HTTP interface: OpenAI's images API, jobs, health, metrics, the page."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from graphrun.serve import routes
from graphrun.serve.access import Logged
from graphrun.serve.answers import Pictures
from graphrun.serve.bodies import refusal_of
from graphrun.serve.errors import Refused
from graphrun.serve.intake import Bounded
from graphrun.serve.origins import Guarded, ServerNames
from graphrun.serve.service import Service


def create_app(service: Service, host: str) -> FastAPI:
    """Return the application on ``host``. The caller starts and closes ``service``."""
    settings = service.settings
    app = FastAPI(title="graphrun", version=settings.version, redoc_url=None)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Location", "Retry-After", "Server-Timing"),
            allow_private_network=True,
        )
    app.add_middleware(
        Guarded, names=ServerNames(host, settings.allow_hosts), origins=settings.allow_origins
    )
    app.add_middleware(Bounded, bounds=settings.bounds)
    app.add_middleware(Logged, metrics=service.metrics)
    app.state.service = service
    pictures = Pictures()
    for router in (
        routes.images(service, pictures),
        routes.models(service),
        routes.jobs(service, pictures),
        routes.videos(service),
        routes.health(service),
        routes.pages(service),
    ):
        app.include_router(router)

    def forget_schema() -> None:
        app.openapi_schema = None

    service.on_reload.append(forget_schema)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, refusal_of(error.errors()[0]))

    @app.exception_handler(Exception)  # the log has the traceback
    async def failed(request: Request, _: Exception) -> Response:
        text = "the server failed; its log has the reason"
        return await refused(request, Refused(500, text, "server_failed"))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        text, code = str(error.detail), "unknown_url"
        if error.status_code == 404:
            text = "there is no such page; /openapi.json lists them"
        elif error.status_code == 405:
            text, code = f"use {(error.headers or {}).get('Allow', '')}", "method_not_allowed"
        return await refused(
            request,
            Refused(
                error.status_code,
                f"{request.method} {request.url.path[:100]}: {text}",
                code,
            ),
        )

    return app
