"""An S3 server on loopback that lets each user do what their policy says, and nothing else.

moto judges actions and resources of IAM policies. Three things of AWS it does not know are added here, each as AWS
documents it: the variable ${aws:username}; the condition StringLike on s3:prefix, without which a statement does not
apply; and that whoever may not list is told 403, and not 404, of what is not there.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from s3_servers import BUCKET

ACCOUNT = "123456789012"
DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'


@contextmanager
def policed_bucket(policies: Mapping[str, str]) -> Iterator[dict[str, dict[str, str]]]:
    """A server with one empty bucket and these users; for each the environment that makes it theirs."""
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    pytest.importorskip("moto", reason="needs moto: THE POLICY OF CONTRIBUTORS NOT TESTED HERE")
    server = subprocess.Popen(
        [sys.executable, __file__, json.dumps(dict(policies))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        yield {
            user: {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{told['port']}",
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            for user, (key, secret) in told["keys"].items()
        }
    finally:
        server.kill()
        server.wait()


def serve(policies: Mapping[str, str]) -> None:
    """Until standard input closes; prints the port and everybody's keys."""
    import logging

    from moto import settings
    from moto.iam import access_control
    from moto.iam.models import iam_backends
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    iam, keys = iam_backends[ACCOUNT]["aws"], {}
    for user, policy in policies.items():
        iam.create_user("us-east-1", user)
        iam.put_user_policy(user, "theirs", policy.replace("${aws:username}", user))
        made = iam.create_access_key(user)
        keys[user] = (made.access_key_id, made.secret_access_key)
    s3_backends[ACCOUNT]["aws"].create_bucket(BUCKET, "us-east-1")
    judged = access_control.IAMPolicyStatement.is_action_permitted

    def with_conditions(self: Any, action: str, resource: str = "*", *more: Any) -> Any:
        from flask import request

        condition = self._statement.get("Condition")
        if condition is None:
            return judged(self, action, resource, *more)
        assert set(condition) == {"StringLike"}, "nothing else is known here"
        assert set(condition["StringLike"]) == {"s3:prefix"}
        asked = request.args.get("prefix")
        if asked is None or not any(
            fnmatch.fnmatchcase(asked, known) for known in condition["StringLike"]["s3:prefix"]
        ):
            return access_control.PermissionResult.NEUTRAL
        free = access_control.IAMPolicyStatement({k: v for k, v in self._statement.items() if k != "Condition"})
        return judged(free, action, resource, *more)

    access_control.IAMPolicyStatement.is_action_permitted = with_conditions  # type: ignore[method-assign]
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    application = DomainDispatcherApplication(create_backend_app)
    may_list = {keys[user][0] for user, policy in policies.items() if '"s3:*"' in policy}

    def closed(environ: dict[str, Any], start_response: Any) -> Any:
        """404 becomes 403 for those who may not list the whole bucket."""
        said: list[Any] = []
        body = b"".join(application(environ, lambda status, headers, *_: said.append((status, headers))))
        status, headers = said[-1]
        who = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        if status.startswith("404") and who not in may_list:
            status, body = "403 FORBIDDEN", b"" if environ["REQUEST_METHOD"] == "HEAD" else DENIED
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(DENIED)))]
        start_response(status, headers)
        return [body]

    server = make_server("127.0.0.1", 0, closed, threaded=True)
    print(json.dumps({"port": server.port, "keys": keys}), flush=True)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
