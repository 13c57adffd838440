"""A store that does not answer: one line instead of a library's traceback, and nothing that goes on for want of it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .credentials import credentials_missing
from .errors import UserError

_LIBRARIES = ("botocore.", "aiobotocore.", "aiohttp.", "urllib3.")  # by name: they are extras
_NETWORK = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET}
)


def is_away(error: BaseException) -> bool:
    """Whether an error means that a store did not answer, or stopped to; not one that the disk here is to blame for."""
    if credentials_missing(error) is not None or isinstance(error, PermissionError):  # "no" is an answer
        return False
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(_LIBRARIES):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return True
    return error.__cause__ is not None and is_away(error.__cause__)


@contextmanager
def reaching(place: str, then: str) -> Iterator[None]:
    """What a store does not answer within is one line: it, why, and what to do `then`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_away(error):
            raise
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{place}: does not answer ({why}); {then}") from error
