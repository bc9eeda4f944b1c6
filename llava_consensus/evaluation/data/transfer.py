"""One file from the network: a download that was cut is resumed, and nothing counts as fetched that is not whole.

    fetch(source.url, Path("downloads/val2014.zip"), md5=source.md5)

The part received so far is `<file>.part`. The same call, or another process after a kill, asks for the rest of it if
the file on the server is still the same one (If-Range), else for the whole.
"""

import os
import time
from pathlib import Path

from tqdm import tqdm

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.files import digest

TRIES = 5  # in a row in which nothing came
TIMEOUT = 30.0  # seconds in which a server must begin to answer, and then send something
AT_ONCE = 1 << 16  # bytes


class TransferError(ConsensusError):
    """The network or a server did not give a file: the same command resumes where this one stopped."""

    exit_code = 5


def fetch(url: str, target: Path, md5: str = "") -> None:
    """Downloads `target` unless it is there.

    Raises:
        TransferError: the server cannot be reached or refuses, or the connection breaks again and again.
        DataError: a page came in place of the file, or its checksum is another one.
    """
    if target.exists():
        return
    import requests
    from urllib3.exceptions import HTTPError  # some of which requests lets through

    target.parent.mkdir(parents=True, exist_ok=True)
    part, tag = (target.with_name(target.name + suffix) for suffix in (".part", ".tag"))
    failed, whole = 0, False
    while not whole:
        before = _size(part)
        try:
            _receive(url, part, tag)
            whole = True
        except (requests.RequestException, HTTPError) as error:
            refused = getattr(getattr(error, "response", None), "status_code", 500) < 500
            failed = 0 if _size(part) > before else failed + 1
            if refused or failed == TRIES:
                raise TransferError(f"{url}: {error}. The same command resumes from {_size(part):,} bytes") from error
            time.sleep(1)
    if md5 and digest(part, "md5") != md5:
        part.unlink()
        raise DataError(f"{target.name}: its md5 is not {md5}, so it is damaged or another version. Fetch it again")
    os.replace(part, target)
    tag.unlink(missing_ok=True)


def _receive(url: str, part: Path, tag: Path) -> None:
    """Appends the missing bytes to `part`, which is then whole; `tag`: the server's mark of the version."""
    import requests

    here, known = _size(part), tag.read_text() if tag.exists() else ""
    headers = {"Accept-Encoding": "identity"}
    if here and known:
        headers |= {"Range": f"bytes={here}-", "If-Range": known}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 416 and answer.headers.get("Content-Range") == f"bytes */{here}":
            return  # nothing is left of it
        if answer.status_code == 416:
            part.unlink()
            raise requests.ConnectionError(f"the {here:,} bytes that were here are no part of the file")
        answer.raise_for_status()
        if "text/html" in answer.headers.get("Content-Type", ""):
            raise DataError(
                f"{url}: the server sent a page in place of the file, as Google Drive does when a file was asked for "
                f"too often. Fetch it in a browser, put it at {part.with_suffix('')}, and give the same command"
            )
        if answer.status_code != 206:
            here = 0
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {here}-"):
            raise requests.ConnectionError("the server sent another part of the file than was asked for")
        length = answer.headers.get("Content-Length")
        total = here + int(length) if length else None
        strong = answer.headers.get("ETag", "")
        tag.write_text(answer.headers.get("Last-Modified", "") if strong[:2] in ("", "W/") else strong)
        with (
            open(part, "ab" if here else "wb") as file,
            tqdm(total=total, initial=here, unit="B", unit_scale=True, desc=part.stem, disable=None) as bar,
        ):
            for piece in answer.iter_content(AT_ONCE):
                file.write(piece)
                bar.update(len(piece))
    if total is not None and _size(part) != total:
        raise requests.ConnectionError(f"the connection ended after {_size(part):,} of {total:,} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
