"""Errors and warnings for users: one line with the option or file, the value, and the fix."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# by name, since they come with extras
STORAGE_LIBRARIES = ("botocore.", "aiobotocore.", "aiohttp.", "urllib3.")
CREDENTIALS = re.compile("Credential|Token|Profile")
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


class UserError(Exception):
    """A mistake the user can fix. The command line prints the message and exits with 2; other errors are bugs."""


class AtollWarning(UserWarning):
    """A warning for the user; the command line prints it as one line."""


def sanitize(text: str, most: int = 300) -> str:
    """Untrusted text for one line on a terminal: no control characters, at most `most` characters."""
    return "".join(c if c.isprintable() else "?" for c in (text if len(text) <= most else f"{text[: most - 3]}..."))


def suggest(word: str, known: Sequence[str], shown: int = 40) -> str:
    """A hint after an unknown word, such as `did you mean horse? known are: bird, cat, horse and 3 more`."""
    close = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    more = f" and {len(known) - shown:,} more" if len(known) > shown else ""
    return f"{hint}known are: {', '.join(list(known)[:shown])}{more}"


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turn errors of a full disk, an unreachable store or missing credentials into a UserError."""
    try:
        yield
    except Exception as error:
        if (problem := storage_problem(error)) is None:
            raise
        raise UserError(f"{place}: {problem}") from error


def storage_problem(error: BaseException) -> str | None:
    """What is wrong with a disk or a store, and the fix; None if the error has another cause."""
    if isinstance(error, UserError | PermissionError):  # a refusal is an answer
        return None
    text, number = " ".join(str(error).split()), getattr(error, "errno", None)
    if number == errno.EDQUOT or os.strerror(errno.ENOSPC) in text:
        return "disk full while writing; free some space and run the same command again"
    library = type(error).__module__.startswith(STORAGE_LIBRARIES)
    if library and CREDENTIALS.search(type(error).__name__):
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return f"no credentials for this object store ({text}); set {keys}"
    if library or isinstance(error, ConnectionError | TimeoutError) or number in UNREACHABLE:
        why = sanitize(text, 160) or type(error).__name__
        return f"does not answer ({why}); check the URL and the network, then run the same command again"
    return None if error.__cause__ is None else storage_problem(error.__cause__)
