"""A server says which reduction it runs: in each model of `/v1/models`, and in a header of every answer. It also
refuses budgets that vLLM would silently ignore.
"""

import json
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from llava_consensus.serving.supported import HEADER, IDENTITY, TOKENS

MESSAGES = "/v1/messages"  # vLLM's copy of Anthropic's API takes no arguments of processors
ERROR = f"mm_processor_kwargs: {MESSAGES} does not take {TOKENS}. Leave it out, or use /v1/chat/completions"
REFUSAL = json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": ERROR}}).encode()


def identity_of(setting: Any) -> dict[str, Any]:
    """Method, options, default budget, limits, position policy and the version of this package."""
    return {
        "method": setting.method,
        "options": dict(setting.options),
        "tokens": setting.tokens,
        "largest": setting.largest,
        "positions": setting.made.positions,
        "plugin": version("llava_consensus"),
    }


class Identity:
    """ASGI middleware of vLLM's API server."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.told: dict[str, Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.told is None:
            from llava_consensus.serving.setting import of_config

            self.told = identity_of(of_config(scope["app"].state.vllm_config.model_config.hf_config))
        header = HEADER.encode(), json.dumps(self.told).encode()
        receive = await checked(scope, receive)
        if receive is None:
            headers = [(b"content-type", b"application/json"), header]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            return await send({"type": "http.response.body", "body": REFUSAL})
        if scope["path"].rstrip("/") != "/v1/models":

            async def send_with_header(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", []), header]}
                await send(message)

            return await self.app(scope, receive, send_with_header)

        start: dict[str, Any] = {}
        body = bytearray()

        async def collect(message: Any) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            content = with_identity(bytes(body), self.told) if start["status"] == 200 else bytes(body)
            headers = [pair for pair in start.get("headers", []) if pair[0].lower() != b"content-length"]
            length = b"content-length", str(len(content)).encode()
            await send({**start, "headers": [*headers, length, header]})
            await send({"type": "http.response.body", "body": content})

        await self.app(scope, receive, collect)


async def checked(scope: Any, receive: Any) -> Any:
    """`receive` of a request; None if it has a budget that vLLM would ignore."""
    if not scope["path"].startswith(MESSAGES) or scope["method"] != "POST":
        return receive
    body, more = bytearray(), True
    while more:
        message = await receive()
        body.extend(message.get("body", b""))
        more = message.get("more_body", False)
    with suppress(ValueError, TypeError):  # vLLM reports the error
        if "mm_processor_kwargs" in json.loads(body):
            return None
    waiting = [{"type": "http.request", "body": bytes(body)}]

    async def next_message() -> Any:
        return waiting.pop() if waiting else await receive()

    return next_message


def with_identity(body: bytes, told: Any) -> bytes:
    listed = json.loads(body)
    for card in listed["data"]:
        card[IDENTITY] = told
    return json.dumps(listed).encode()
