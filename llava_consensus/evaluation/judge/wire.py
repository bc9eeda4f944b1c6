"""The connection to a judge's server, bounded: no redirect is followed, and a reply has a largest size.

`openai.AsyncOpenAI(http_client=bounded_client(openai))`. A reply is asked for without compression and refused with it,
so that a few bytes cannot become gigabytes.
"""

from types import ModuleType
from typing import Any

LARGEST = 4 << 20  # bytes of one reply


class Refused(Exception):
    """What a server sent is not read; says why."""


def bounded_client(openai: ModuleType) -> Any:
    """An HTTP client of the library that `openai` is built on.

    Every request raises Refused for a reply that is compressed or too large.
    """

    class Bounded(openai.DefaultAsyncHttpxClient):  # type: ignore[name-defined]
        async def send(self, request: Any, **options: Any) -> Any:
            response = await super().send(request, **{**options, "stream": True})
            try:
                content = await _read(response)
            finally:
                await response.aclose()
            return type(response)(response.status_code, headers=response.headers, content=content, request=request)

    return Bounded(follow_redirects=False, headers={"Accept-Encoding": "identity"})


async def _read(response: Any) -> bytes:
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise Refused(f"the reply is compressed ({coding[:20]}), which was not asked for")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > LARGEST:
            raise Refused(f"the reply is longer than {LARGEST:,} bytes")
    return bytes(content)
