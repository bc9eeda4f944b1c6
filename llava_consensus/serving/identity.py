"""A server says which reduction it runs: in each model of `/v1/models`, and in a header of every answer.

`llava-consensus serve` passes `Identity` to vLLM by its public option `--middleware`.
"""

import json
from importlib.metadata import version
from typing import Any

from llava_consensus.serving.supported import HEADER, IDENTITY


def identity_of(setting: Any) -> dict[str, Any]:
    """Method, options, default budget, limits, position policy and the version of this package."""
    return {
        "method": setting.method,
        "options": dict(setting.options),
        "tokens": setting.tokens,
        "largest": setting.largest,
        "total": setting.total,
        "positions": setting.made.positions,
        "plugin": version("llava_consensus"),
    }


class Identity:
    """ASGI middleware of vLLM's API server.

    Args:
        app: the application that answers.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.told: dict[str, Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers as the application does, with the identity beside it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.told is None:
            from llava_consensus.serving.setting import of_config

            self.told = identity_of(of_config(scope["app"].state.vllm_config.model_config.hf_config))
        header = HEADER.encode(), json.dumps(self.told).encode()
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


def with_identity(body: bytes, told: Any) -> bytes:
    """A list of models in which each says what it is."""
    listed = json.loads(body)
    for card in listed["data"]:
        card[IDENTITY] = told
    return json.dumps(listed).encode()
