"""The one exception that means: the user can fix this."""


class UserError(Exception):
    """A mistake the user can mend. The message is one line: the option or file, the value, and the fix.

    The command line prints it and exits with code 2; anything else that is raised is our bug.
    """


class Notice(UserWarning):
    """What a user should know and what stops nothing: a warning in Python, one line on the command line."""
