"""The key of a judge's server, and how it is kept out of everything that is stored, shown or raised.

    key = Key(os.environ.get("OPENAI_API_KEY", ""))
    key.hide("401: Bearer sk-...")        # "401: Bearer [key]"

A server, or the client library, may repeat the key in its errors: as it is, escaped, in a URL or in base64.
"""

import base64
import html
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from llava_consensus.errors import OptionError

KEY = "OPENAI_API_KEY"
SECRET = 8  # characters; a shorter key is a dummy, such as "none"
HIDDEN = "[key]"
WHOLE = "[a text with the key in it]"
LOOKS_LIKE_ONE = re.compile(
    r"\b(sk|pk|gsk|hf|xai|key|api|ghp)[-_][A-Za-z0-9_\-]{12,}|\b(?=\w*\d)(?=\w*[A-Za-z])\w{32,}"
)
NAMES_ONE = re.compile(
    r"api.?key|authori[sz]ation|password|secret|bearer|(access|auth).?token|extra_(headers|query)", re.I
)
ESCAPE = re.compile(r"\\+(?:u00|x)([0-9a-fA-F]{2})")


class Key:
    """A key, never shown; may be empty.

    Raises:
        OptionError: it holds what no key can: blanks, line breaks, control characters, letters beyond ASCII.
    """

    def __init__(self, text: str) -> None:
        self._text = text.strip()
        for place, letter in enumerate(self._text, start=1):
            if not "!" <= letter <= "~":
                raise OptionError(
                    f"{KEY} has {letter!a} as its character {place}, which cannot be sent. Set the key alone, "
                    "without blanks and line breaks"
                )
        self._forms = re.compile("|".join(map(re.escape, _forms(self._text))), re.IGNORECASE) if self._secret else None

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return f"Key({HIDDEN if self else ''})"

    def reveal(self) -> str:
        """The key itself, for the request's header alone."""
        return self._text

    def hide(self, text: str) -> str:
        """A text without the key in any form."""
        if self._forms is None:
            return text
        text = self._forms.sub(HIDDEN, text)
        return WHOLE if any(self._text in way for way in _read(text)) else text

    def hide_all(self, value: Any) -> Any:
        """A JSON value without the key in any text of it."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(name): self.hide_all(one) for name, one in value.items()}
        return [self.hide_all(one) for one in value] if isinstance(value, list | tuple) else value

    def within(self, text: str) -> bool:
        """Whether a text has the key in it, or what looks like one."""
        return self.hide(text) != text or LOOKS_LIKE_ONE.search(text) is not None

    @property
    def _secret(self) -> bool:
        return len(self._text) >= SECRET


def names_a_key(name: str) -> bool:
    """Whether an option's name says that its value is a key."""
    return NAMES_ONE.search(name) is not None


def _forms(key: str) -> list[str]:
    """The key as libraries and servers write it; longest first, so that none leaves a rest of another."""
    escaped = [json.dumps(key)[1:-1], json.dumps(json.dumps(key))[3:-3], repr(key)[1:-1], html.escape(key)]
    urls = [quote(key), quote(key, safe=""), quote_plus(key), "".join(f"%{ord(one):02x}" for one in key)]
    coded = [key.encode().hex(), key[::-1], *_base64(key.encode())]
    return sorted({key, *escaped, *urls, *coded}, key=len, reverse=True)


def _base64(key: bytes) -> Iterator[str]:
    """What base64 of any text around the key has in common, at each of the three places it can begin."""
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + key).rstrip(b"=").decode()
        core = whole[(0, 2, 3)[shift] : len(whole) - (1 if (shift + len(key)) % 3 else 0)]
        yield from (core, core.replace("+", "-").replace("/", "_"))


def _read(text: str) -> Iterator[str]:
    """A text as one could still read it: unescaped, without its line breaks."""
    plain = re.sub(r"\s+", "", text)
    unescaped = ESCAPE.sub(lambda found: chr(int(found[1], 16)), plain)
    yield from (plain, unescaped, unquote(plain), unquote_plus(unquote(plain)), html.unescape(plain))
