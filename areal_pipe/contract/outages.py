"""Telling outages from bad data and bad code, whoever raises them and whatever library they use.

Exceptions of other libraries are known by the names along their class's MRO: nothing is imported.
"""

import errno
from collections.abc import Iterator
from typing import Any

from areal_pipe.contract.errors import InfrastructureError, RewardError

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EDQUOT", "EHOSTDOWN",
        "EHOSTUNREACH", "EIO", "EMFILE", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENFILE",
        "ENOBUFS", "ENOLCK", "ENOMEM", "ENOSPC", "EPIPE", "EROFS", "ESHUTDOWN", "ESTALE",
        "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip

_HTTPX = frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"})
_CLASSES: dict[str, frozenset[str]] = {
    "aiohttp": frozenset(
        {
            "ClientConnectionError",
            "ClientPayloadError",
            "ServerTimeoutError",
            "WSServerHandshakeError",
        }
    ),
    "httpx": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"}),
    "httpcore": frozenset(
        {"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"}
    ),
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError"}),
    "urllib3": frozenset(
        {"TimeoutError", "ProtocolError", "NewConnectionError", "MaxRetryError", "ProxyError"}
    ),
    "urllib": frozenset({"URLError"}),
    "openai": frozenset({"APIConnectionError", "InternalServerError", "RateLimitError"}),
    "anthropic": frozenset({"APIConnectionError", "InternalServerError", "RateLimitError"}),
    "botocore": frozenset({"ConnectionError", "HTTPClientError", "IncompleteReadError"}),
    "socket": frozenset({"gaierror", "herror"}),
    "ssl": frozenset({"SSLZeroReturnError", "SSLEOFError", "SSLSyscallError"}),
}
"""Transport errors by the package that defines them."""

_RETRIABLE_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_STATUS_CLASSES = frozenset(
    {"ClientResponseError", "HTTPStatusError", "HTTPError", "APIStatusError", "ClientError"}
)
"""Classes of those packages that carry an HTTP status, which then decides."""
_S3_CODES = frozenset(
    {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling"}
)


def is_infrastructure(error: BaseException) -> bool:
    """Whether waiting and trying again can help: an outage, as opposed to bad data or bad code.

    Of several errors raised together, all must be outages.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_infrastructure(e) for e in error.exceptions)
    if isinstance(error, RewardError):
        return error.infrastructure
    if isinstance(error, InfrastructureError | TimeoutError | ConnectionError):
        return True
    status = _status_of(error)
    if status is not None:
        return status in _RETRIABLE_STATUSES or status in _S3_CODES
    if any(name in _CLASSES.get(package, ()) for package, name in _lineage(error)):
        return True
    return isinstance(error, OSError) and error.errno in _ERRNOS


def _lineage(error: BaseException) -> Iterator[tuple[str, str]]:
    """(top-level package, class name) along the MRO."""
    for base in type(error).__mro__:
        yield str(base.__module__).partition(".")[0], base.__name__


def _status_of(error: BaseException) -> int | str | None:
    """The HTTP status (or S3 code) that a client library's error carries."""
    known = any(
        name in _STATUS_CLASSES and package in _CLASSES for package, name in _lineage(error)
    )
    if not known:
        return None
    try:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            code = response.get("Error", {}).get("Code", "")
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return code if code in _S3_CODES else status
        for holder in (error, response):
            for name in ("status_code", "status", "code"):
                status = getattr(holder, name, None)
                if isinstance(status, int):
                    return status
    # Attributes of foreign exceptions may be properties that raise.
    except Exception:  # noqa: BLE001
        return None
    return None
