"""The collector of cyclic garbage rests while anybody wants it to, and is left as it was found.

Run: `pytest tests/test_collector.py`.
"""

import gc
import threading

import pytest

from llava_consensus.evaluation.runs.collector import collector_rests


def test_it_rests_inside_and_works_again_behind_an_error() -> None:
    @collector_rests()
    def failing() -> None:
        assert not gc.isenabled()
        with collector_rests():
            pass
        assert not gc.isenabled()
        raise ValueError

    with pytest.raises(ValueError):
        failing()
    assert gc.isenabled()


def test_it_rests_until_the_last_thread_is_through() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_rests():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with collector_rests():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_the_user_has_stopped_stays_stopped() -> None:
    gc.disable()
    try:
        with collector_rests():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
