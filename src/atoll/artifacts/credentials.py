"""Object stores that do not know who is asking: one line instead of a library's traceback."""

from __future__ import annotations

# of botocore, by name: s3fs is an extra, and importing it only to ask would take a second
_MISSING = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "NoAuthTokenError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "TokenRetrievalError",
}


def credentials_missing(error: BaseException) -> str | None:
    """What to do about an error that means "no credentials"; None for any other."""
    kind = type(error)
    if kind.__name__ not in _MISSING or not kind.__module__.startswith("botocore."):
        return None
    return (
        f"no credentials for this object store ({' '.join(str(error).split())}); "
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    )
