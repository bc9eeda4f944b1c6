"""The key of a judge's server is in no file, no output and no exception, in whatever form it comes back."""

import base64
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from judge_server import Act, Server, error
from judged_data import SECRET, judge, judge_config

pytest.importorskip("openai")

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.judge.client import NAME, JudgeError
from llava_consensus.evaluation.judge.secret import HIDDEN, Key

WRITTEN_TWICE = "sk->>>>>>?????????>>>>>>"  # with + and / in base64, - and _ in that of addresses
ODD = 'sk-"odd\\key/+%&<0123456789>'


def coded(key: str) -> list[str]:
    """The key as a server might give it back."""
    header = f"Bearer {key}".encode()
    return [
        key,
        json.dumps(key),
        json.dumps(json.dumps({"a": key})),
        repr(header),
        quote(key, safe=""),
        quote(key),
        quote(quote(key, safe=""), safe=""),
        base64.b64encode(header).decode(),
        base64.urlsafe_b64encode(f"user:{key}".encode()).decode(),
        base64.b64encode(f"x{key}y".encode()).decode(),
        *(base64.urlsafe_b64encode(f"{front}{key}".encode()).decode() for front in ("", "x", "xy")),
        key.encode().hex(),
        key[::-1],
        "".join(f"\\u{ord(one):04x}" for one in key),
        "".join(f"%{ord(one):02x}" for one in key),
        "".join(f"&#{ord(one)};" for one in key),
        key[:7] + "\r\n" + key[7:],
        key.upper(),
    ]


@pytest.mark.parametrize("key", [SECRET, ODD, "0123456789ab", WRITTEN_TWICE])
def test_every_form_of_the_key_is_hidden(key: str) -> None:
    hidden = Key(key)
    for form in coded(key):
        found = hidden.hide(f"before {form} after")
        assert (form not in found and HIDDEN[:4] in found) or "[a text" in found, form
        core = base64.b64encode(key.encode()).decode()[4:-4]
        assert core not in found and key[3:-1] not in found
    assert hidden.hide("a harmless text, 0.5") == "a harmless text, 0.5"
    assert key not in repr(hidden) and Key("none").hide("none") == "none"


@pytest.mark.parametrize(
    "key", [f"{SECRET}\nmore", f"{SECRET}\r\nX-More: 1", "sk-é-0123456789", "sk-01234\x0056789", "a b"]
)
def test_a_key_that_no_header_can_hold_is_refused_unseen(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "OPENAI_API_KEY": key})  # the system takes no zero byte
    with pytest.raises(OptionError, match="cannot be sent") as caught:
        judge(judge_config(tmp_path, "http://127.0.0.1:9/v1"))
    assert key not in str(caught.value) and SECRET not in repr(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", " \n\n"])
def test_a_line_break_at_the_end_of_the_key_reaches_neither_server_nor_disk(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET + end)
    with Server(lambda text, number: Act() if number else error(500, f"{SECRET!r} {json.dumps(SECRET)}")) as server:
        judge(judge_config(tmp_path, server.url))
        assert server.keys == {f"Bearer {SECRET}"}
    assert not holders(tmp_path)


def holders(place: Path) -> list[Path]:
    core = base64.b64encode(f"Bearer {SECRET}".encode())[8:-4]
    wanted = (SECRET.encode(), core, SECRET.encode().hex().encode(), quote(SECRET, safe="").encode())
    return [path for path in place.rglob("*") if path.is_file() and any(one in path.read_bytes() for one in wanted)]


def test_a_server_that_repeats_every_form_leaves_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forms = coded(SECRET)
    caplog.set_level(logging.DEBUG)

    def behave(text: str, number: int) -> Act:
        if number < 2:
            return error(500, forms[number])
        return Act(text=f"0.5 {SECRET if number == 2 else forms}", message={form: form for form in forms})

    with Server(behave) as server:
        judge(judge_config(tmp_path, server.url))
    assert HIDDEN in (tmp_path / "out" / NAME).read_text()
    with Server(lambda *_: error(401, " ".join(forms))) as server, pytest.raises(JudgeError) as caught:
        judge(judge_config(tmp_path, server.url, runs=2))
    assert not holders(tmp_path)
    assert SECRET not in caplog.text + repr(caught.value) + repr(caught.value.__context__) + str(caught.value.__cause__)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        f"https://user:{SECRET}@host/v1",
        f"https://host/v1?key={SECRET}",
        f"https://host/{SECRET}/v1",
        f"https://host/v1#{SECRET}",
        "https://host/v1#anything",
        f"https://host/{quote(SECRET, safe='').replace('-', '%2D')}/v1",
        "https://host/sk-proj-another0123456789/v1",
        f"{SECRET}://host",
        f"https://user:{SECRET}@host:port/v1",
        f"{SECRET}",
    ],
)
def test_a_key_anywhere_in_the_url_is_refused_unseen(tmp_path: Path, url: str) -> None:
    with pytest.raises(OptionError, match=r"no key in the URL|must be like http://") as caught:
        judge_config(tmp_path, url)
    assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "x"},
        {"user": SECRET},
        {"metadata": {"a": [SECRET]}},
        {"extra_headers": {"Authorization": "x"}},
        {"Authorization": "Bearer x"},
        {SECRET: 1},
    ],
)
def test_a_key_in_an_option_is_refused_unseen(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = judge_config(tmp_path, "http://localhost/v1", options={"max_tokens": 3, "top_p": 0.5})
    with pytest.raises(OptionError, match="no key in an option") as caught:
        replace(wanted, options=options)
    assert SECRET not in str(caught.value)
