"""Which failures are outages, whatever library raised them."""

import errno
import urllib.error
from typing import Any

import pytest

from areal_pipe.contract.errors import (
    EngineUnavailable,
    InfrastructureError,
    RequestError,
    RewardError,
    StageTimeout,
    StorageUnavailable,
)
from areal_pipe.contract.outages import is_infrastructure


def foreign(path: str, *, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    """An exception as another library defines it: `package.module.Class`."""
    module, _, name = path.rpartition(".")
    error = type(name, (base,), {"__module__": module})("broken")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


def reward_error(*, infrastructure: bool) -> RewardError:
    error = RewardError("the judge is away")
    error.infrastructure = infrastructure
    return error


OUTAGES = [
    TimeoutError(),
    ConnectionResetError(),
    InfrastructureError("our judge is being restarted"),
    EngineUnavailable("away"),
    StorageUnavailable("away"),
    OSError(errno.ENOSPC, "disk full"),
    OSError(errno.EMFILE, "too many files"),
    urllib.error.URLError("no route"),
    foreign("aiohttp.client_exceptions.ClientConnectionError"),
    foreign("httpx.ConnectTimeout", base=type(foreign("httpx.TimeoutException"))),
    foreign("requests.exceptions.ConnectionError", base=OSError),
    foreign("urllib3.exceptions.ProtocolError"),
    foreign("openai.APIConnectionError"),
    foreign("openai.RateLimitError", status_code=429),
    foreign("botocore.exceptions.HTTPClientError"),
    foreign("aiohttp.client_exceptions.ClientResponseError", status=503),
    foreign("httpx.HTTPStatusError", response=Response(502)),
    foreign("botocore.exceptions.ClientError", response={"Error": {"Code": "SlowDown"}}),
    ExceptionGroup("both", [TimeoutError(), ConnectionError()]),
    reward_error(infrastructure=True),
]
MISTAKES = [
    ValueError("bad answer"),
    RequestError("prompt too long"),
    StageTimeout("the agent loops"),
    FileNotFoundError(errno.ENOENT, "no such file"),
    foreign("httpx.HTTPStatusError", response=Response(400)),
    foreign("openai.BadRequestError", base=type(foreign("openai.APIStatusError")), status_code=400),
    foreign("my_agent.ConnectTimeout"),
    ExceptionGroup("mixed", [TimeoutError(), KeyError("answer")]),
    reward_error(infrastructure=False),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda e: type(e).__name__)
def test_an_outage_is_known_wherever_it_arises(error: Exception) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize("error", MISTAKES, ids=lambda e: type(e).__name__)
def test_everything_else_is_bad_data_or_bad_code(error: Exception) -> None:
    assert not is_infrastructure(error)
