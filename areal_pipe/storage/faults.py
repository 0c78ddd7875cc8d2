"""What file systems and S3 raise, turned into our storage errors: refused, full, away, changed."""

import contextlib
import errno
from collections.abc import Generator

from areal_pipe.contract.errors import StorageError, StorageUnavailable

_REFUSED = ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "Forbidden", "403")
_PRECONDITION = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


class PreconditionFailed(StorageError):
    """A conditional write met another state."""


@contextlib.contextmanager
def local_errors(where: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"no space left to write {where}; free some and run again: "
                "finished episodes are kept"
            ) from error
        raise StorageError(f"cannot access {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def remote_errors(where: str) -> Generator[None]:
    try:
        yield
    except (StorageError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError):
            raise StorageError(f"{where} does not exist (or its bucket does not)") from error
        raise
    # Every protocol has its own exception classes; the store is the boundary they end at.
    except Exception as error:
        raise _translated(error, where) from error


def _translated(error: BaseException, where: str) -> StorageError:
    code = _code_of(error)
    if code in _PRECONDITION or "PreconditionFailed" in str(error):
        return PreconditionFailed(f"{where}: {error}")
    if code in _REFUSED or isinstance(error, PermissionError):
        return StorageError(
            f"access to {where} was refused ({code or error}); check the credentials "
            "and the bucket's policy"
        )
    if type(error).__name__ == "NoCredentialsError":
        return StorageError(
            f"no credentials for {where}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or give them in the configuration"
        )
    return StorageUnavailable(f"cannot reach {where}: {type(error).__name__}: {error}")


def _code_of(error: BaseException | None) -> str:
    """The S3 error code, from the exception or what it was raised from."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
