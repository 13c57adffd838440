"""The one exception that means: the user can fix this."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class UserError(Exception):
    """A mistake the user can mend. The message is one line: the option or file, the value, and the fix.

    The command line prints it and exits with code 2; anything else that is raised is our bug.
    """


class AtollWarning(UserWarning):
    """What a user should know and what stops nothing: a warning in Python, one line on the command line."""


def suggest(word: str, known: Sequence[str], shown: int = 40) -> str:
    """What to say after a word that is not known: those that look like it, and what there is.

    Such as `did you mean horse? known are: bird, cat, horse and 3 more`.
    """
    close = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    more = f" and {len(known) - shown:,} more" if len(known) > shown else ""
    return f"{hint}known are: {', '.join(list(known)[:shown])}{more}"
