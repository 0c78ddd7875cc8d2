"""The child side of the reward pool: one process, one reward at a time, killable at any moment.

A call's answer is JSON. Nothing that user code made is unpickled by the parent.
"""

import ctypes
import functools
import json
import os
import pickle
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from areal_pipe.contract.outages import is_infrastructure
from areal_pipe.rewards.process_state import ProcessState, end_descendants
from areal_pipe.rewards.value import as_reward

LOADED = b"loaded"
"""Sent once the function is unpickled (its modules imported): the time limit starts here."""
MAX_CHARACTERS = 4000
"""Characters kept of a message or traceback."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def serve(connection: Connection, output: int, memory_limit_bytes: int | None) -> None:
    """Answer calls until the parent closes the connection or dies.

    Args:
        output: descriptor that takes what rewards print.
    """
    _isolate(output, memory_limit_bytes)
    state = ProcessState()
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        answer = _answer(call, connection)
        end_descendants()
        answer["reusable"] = state.put_back()
        connection.send_bytes(json.dumps(answer).encode())


def become_subreaper() -> None:
    """Descendants whose parents end become this process's children, to be found and killed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _isolate(output: int, memory_limit_bytes: int | None) -> None:
    """Own process group, no terminal, output to the parent, memory bounded, never an orphan."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    become_subreaper()
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    # Line by line: what was printed before a crash is known then.
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)


def _answer(call: bytes, connection: Connection) -> dict[str, Any]:
    process = os.getpid()
    try:
        pickled_fn, arguments, seed = pickle.loads(call)
        fn = _function(pickled_fn)
        args, kwargs = pickle.loads(arguments)
        connection.send_bytes(LOADED)
        _seed(seed)
        return {"reward": as_reward(fn(*args, **kwargs))}
    # The boundary of user code: whatever it raises is the answer.
    except BaseException as error:  # noqa: BLE001
        return _described(error)
    finally:
        if os.getpid() != process:  # the reward forked, and this is the copy that came back
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)


@functools.lru_cache(maxsize=16)
def _function(pickled: bytes) -> Callable[..., Any]:
    """Kept between calls, so that what a function has loaded stays loaded."""
    return pickle.loads(pickled)


def _seed(seed: int) -> None:
    """Random state of the call; of numpy and torch where something has imported them."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    # It may be anything: a reward can replace or close it.
    except Exception:  # noqa: BLE001
        return


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "raised": type(error).__name__,
        "message": _text_of(lambda: str(error)) or "",
        "traceback": _text_of(lambda: _traceback(error)) or "",
        "infrastructure": is_infrastructure(error),
    }


def _traceback(error: BaseException) -> str:
    """Without this module's own frame, which stands first."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_list(traceback.extract_tb(trace))).rstrip()


def _text_of(say: Callable[[], str]) -> str:
    """Bounded text of an exception, whose own methods may raise."""
    try:
        return say()[-MAX_CHARACTERS:]
    except BaseException as another:  # noqa: BLE001
        return f"(its text cannot be had: {type(another).__name__})"
