"""The key of a judge's server, and how it is kept out of everything that is stored, shown or raised.

    key = Key(os.environ.get("OPENAI_API_KEY", ""))
    key.hide("401: Bearer sk-...")        # "401: Bearer [key]"

A server, or the client library, may repeat the key in its errors: as it is, escaped, in a URL or in base64.
"""

import base64
import html
import re
from collections.abc import Iterator
from urllib.parse import unquote

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

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return f"Key({HIDDEN if self else ''})"

    def reveal(self) -> str:
        """The key itself, for the request's header alone."""
        return self._text

    def hide(self, text: str) -> str:
        """A text without the key: cut out where it stands as it is, the whole text replaced where it is encoded."""
        if len(self._text) < SECRET:
            return text
        text = re.sub(re.escape(self._text), HIDDEN, text, flags=re.IGNORECASE)
        forms = [_bare(form) for form in _forms(self._text)]
        return WHOLE if any(form in _bare(decoded) for decoded in _decoded(text) for form in forms) else text

    def within(self, text: str) -> bool:
        """Whether a text has the key in it, or what looks like one."""
        return self.hide(text) != text or LOOKS_LIKE_ONE.search(text) is not None


def names_a_key(name: str) -> bool:
    """Whether an option's name says that its value is a key."""
    return NAMES_ONE.search(name) is not None


def _forms(key: str) -> Iterator[str]:
    """The key, reversed, in hexadecimal, and what base64 of any text around it has in common, at each of the three
    places where it can begin.
    """
    yield from (key, key[::-1], key.encode().hex())
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + key.encode()).rstrip(b"=").decode()
        core = whole[(0, 2, 3)[shift] : len(whole) - (1 if (shift + len(key)) % 3 else 0)]
        yield from (core, core.replace("+", "-").replace("/", "_"))


def _decoded(text: str) -> Iterator[str]:
    """A text as one could still read it: unescaped, without its line breaks."""
    plain = re.sub(r"\s+", "", text)
    yield from (plain, ESCAPE.sub(lambda found: chr(int(found[1], 16)), plain), html.unescape(plain))
    yield from (unquote(plain), unquote(unquote(plain)))


def _bare(text: str) -> str:
    """Without the backslashes that quoting adds, in lower case."""
    return text.replace("\\", "").lower()
