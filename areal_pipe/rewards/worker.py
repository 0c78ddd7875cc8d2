"""The child side of the reward pool: one process, one reward at a time, killable at any moment."""

import ctypes
import os
import pickle
import resource
import runpy
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from areal_pipe.contract.errors import RewardError
from areal_pipe.rewards.value import as_reward

LOADED = b"loaded"
"""Sent once the function is unpickled (its modules imported): the time limit starts here."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How a call ended: a number, or an exception."""

    reward: float | None = None
    error: BaseException | None = None


def serve(connection: Connection, memory_limit_bytes: int | None) -> None:
    """Answer calls until the parent closes the connection or dies."""
    _isolate(memory_limit_bytes)
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_answer(call, connection))


def _isolate(memory_limit_bytes: int | None) -> None:
    """Own process group, no terminal, output discarded, memory bounded, dead with its parent."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _answer(call: bytes, connection: Connection) -> bytes:
    try:
        main_path, pickled = pickle.loads(call)
        _import_main(main_path)
        fn, args, kwargs = pickle.loads(pickled)
        connection.send_bytes(LOADED)
        return pickle.dumps(Reply(reward=as_reward(fn(*args, **kwargs))))
    # The boundary of user code: whatever it raises is the answer.
    except BaseException as error:  # noqa: BLE001
        return _pickled_error(error)


def _import_main(path: str | None) -> None:
    """Make functions of the caller's main script importable; its `__main__` block does not run."""
    if path is not None and getattr(sys.modules["__main__"], "__file__", None) != path:
        main = ModuleType("__main__")
        main.__dict__.update(runpy.run_path(path, run_name="__reward_main__"))
        main.__file__ = path
        sys.modules["__main__"] = main


def _pickled_error(error: BaseException) -> bytes:
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        return pickle.dumps(Reply(error=_round_tripped(error)))
    except Exception:  # noqa: BLE001 - exceptions can fail to pickle in any way
        return pickle.dumps(Reply(error=RewardError(f"{type(error).__name__}: {error}")))


def _round_tripped(error: BaseException) -> Any:
    """The exception if it survives pickling with its type, else TypeError."""
    return pickle.loads(pickle.dumps(error)) and error
