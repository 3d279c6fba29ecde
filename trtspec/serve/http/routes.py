"""The HTTP interface: OpenAI's endpoints, and endpoints for operators."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import trtspec
from trtspec.serve.http import api_errors
from trtspec.serve.http.answers import ChatAnswer, CompletionAnswer
from trtspec.serve.http.api_errors import ApiError
from trtspec.serve.http.live import live_view
from trtspec.serve.http.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from trtspec.serve.http.service import Service
from trtspec.serve.http.tools import Notation, demanded_schema, notation_of

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request is wrong: see `error`"},
    401: {"description": "no valid API key"},
    404: {"description": "no such model"},
    408: {"description": "the request took longer than its timeout"},
    413: {"description": "the body is too large"},
    429: {"description": "too much is in flight; Retry-After says when to try again"},
    503: {"description": "there is no engine right now; Retry-After says when to try again"},
}
_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}


def build_app(service: Service) -> FastAPI:
    """The app with all routes of a service."""
    app = FastAPI(
        title="trtspec",
        version=trtspec.__version__,
        description="OpenAI-compatible generation",
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
    )
    api_errors.install(app)
    app.include_router(live_view(service))

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue one prompt or several, given as text or as token ids."""
        started = time.perf_counter()
        service.check_model(body.model)
        if body.suffix:
            raise ApiError(400, "suffix is not supported; leave it out", "suffix")
        if body.best_of not in (None, body.n):
            raise ApiError(400, f"best_of = {body.best_of} is not supported; leave it out, or set it to n", "best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: a prompt's tokens have no logprobs here", "echo")
        prompts = _prompts(body)
        service.check_room(len(prompts), body.n)
        ids = await service.encode(prompts)
        asked, room = "max_tokens" in body.model_fields_set, service.room(ids)
        max_tokens = body.max_tokens if asked else min(body.max_tokens or room, room)
        more = {"max_tokens": max_tokens, "logprobs": body.logprobs, **_constraint(body)}
        generation = service.start(body, ids, more, started)
        echoed = None
        if body.echo:
            echoed = [one if isinstance(one, str) else service.decode(one) for one in prompts]
        return await CompletionAnswer(body, generation, echoed).respond(http)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        """Generate the next message of a conversation, with the checkpoint's chat template."""
        started = time.perf_counter()
        service.check_model(body.model)
        service.check_room(1, body.n)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        ids = await service.encode_chat(messages, _template_options(body))
        more: dict[str, Any] = {
            "max_tokens": body.max_completion_tokens or body.max_tokens or service.room([ids]),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        notation: Notation | None = None
        unhidden = False
        if body.tools and body.tool_choice is not None and body.demands_call:
            if _constraint(body):
                raise ApiError(400, "tool_choice demands a call, response_format something else", "tool_choice")
            schema = demanded_schema(body.tools, body.tool_choice, body.parallel_tool_calls)
            more["structured_outputs"] = {"json": schema}
        elif body.tools and body.tool_choice != "none":
            notation = notation_of(service.chat_template)
            if "skip_special_tokens" not in body.model_fields_set and service.hides(notation.markers):
                unhidden, more["skip_special_tokens"] = True, False
        generation = service.start(body, [ids], {**more, **_constraint(body)}, started)
        return await ChatAnswer(body, generation, notation, unhidden).respond(http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that is served."""
        info = service.info
        card = {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "trtspec",
            "max_model_len": service.context,
            "speculation": {"mode": info.mode, "max_draft_len": info.max_draft_len, "lossy": info.lossy},
        }
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 while this process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "there is no engine right now"}})
    async def ready() -> Response:
        """Return 200 while requests can run, else 503, and the engine's state in both cases."""
        client = service.client
        state = {"state": client.state, "last_engine_ended": client.why}
        return JSONResponse(state, 200 if client.state == "ready" else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of trtspec."""
        return {"version": trtspec.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Prompts of a request, one or more, each as text or as token ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    ids = [one for one in body.prompt if isinstance(one, int)]
    if ids or not body.prompt:
        return [ids]
    return [one for one in body.prompt if not isinstance(one, int)]


def _constraint(body: GenerationRequest) -> dict[str, Any]:
    """structured_outputs as response_format or a guided_* field sets it. ApiError if more than one field does."""
    asked: dict[str, Any] = {}
    if body.response_format is not None and body.response_format.type == "json_object":
        asked["json_object"] = True
    elif body.response_format is not None and body.response_format.json_schema is not None:
        asked["json"] = body.response_format.json_schema.schema_
    fields = {"json": body.guided_json, "regex": body.guided_regex, "choice": body.guided_choice}
    for name, value in {**fields, "grammar": body.guided_grammar}.items():
        if value is not None:
            if asked:
                raise ApiError(400, "response_format and guided_* fields: give one of them", f"guided_{name}")
            asked[name] = value
    return {"structured_outputs": asked} if asked else {}


def _template_options(body: ChatCompletionRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    reserved = sorted(_TEMPLATE_NAMES & set(options))
    if reserved:
        raise ApiError(
            400, f"chat_template_kwargs holds {', '.join(reserved)}; they are set otherwise", "chat_template_kwargs"
        )
    if options.pop("continue_final_message", None):
        raise ApiError(400, "continue_final_message is not built; leave it out", "chat_template_kwargs")
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return {**options, "add_generation_prompt": body.add_generation_prompt}
