"""One file from the network: what a cut left is gone on with, and nothing counts as fetched that is not whole.

    fetch(source.url, Path("downloads/val2014.zip"), md5=source.md5)

The transfer itself, with bar and retries, is `huggingface_hub.file_download.http_get`. What has come so far, but for
its last 10 MiB, is `<file>.part`; a later call, or another process after a kill, asks for the rest of it.
"""

import os
from pathlib import Path

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.files import digest, replace

SUFFIX = ".part"


class TransferError(ConsensusError):
    """The network or a server did not give a file: the same command goes on where this one stopped."""

    exit_code = 5


def fetch(url: str, target: Path, md5: str = "") -> None:
    """Brings `target` here unless it is.

    Raises:
        TransferError: the server cannot be reached or refuses, or the connection breaks again and again.
        DataError: what came is a page in place of a file, or not of this hash.
    """
    if target.exists():
        return
    from huggingface_hub.file_download import http_get

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + SUFFIX)
    try:
        with open(part, "ab") as file:
            http_get(url, file, resume_size=file.tell(), displayed_filename=target.name)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # of httpx, requests or the hub, whichever of them is installed
        if "416" in str(error):  # nothing is left to ask for: it was whole, or it is longer than the file
            if _whole(url, part):
                return _take(part, target, md5)
            part.unlink(missing_ok=True)
        raise TransferError(f"{url}: {error}. The same command goes on from {_size(part):,} bytes") from error
    _take(part, target, md5)


def _whole(url: str, part: Path) -> bool:
    """Whether what is here is as long as the file on the server."""
    import requests

    try:
        answer = requests.head(url, allow_redirects=True, timeout=30)
    except requests.RequestException:
        return False
    return answer.headers.get("content-length") == str(_size(part))


def _take(part: Path, target: Path, md5: str) -> None:
    """Gives a whole file its name once it is known to be one."""
    with open(part, "rb") as file:
        page = file.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html"))
    if page:
        part.unlink()
        raise DataError(
            f"{target.name}: the server sent a page in place of the file, as Google Drive does when a file was asked "
            f"for too often. Fetch it in a browser, put it at {target}, and give the same command"
        )
    if md5 and digest(part, "md5") != md5:
        part.unlink()
        raise DataError(f"{target.name}: its md5 is not {md5}, so it is damaged or another version. Fetch it again")
    os.replace(part, target)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def mark(path: Path, text: str) -> None:
    """Says that a file was unpacked, so that it need not stay."""
    replace(path, text.encode())
