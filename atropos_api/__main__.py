"""Start run-api behind its auth middleware.

python -m atropos_api [--host 127.0.0.1] [--port 8000]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

import uvicorn

from atropos_api.auth import ENV_MAX_BODY, ENV_UIDS, AuthMiddleware, Settings
from atropos_api.batches import Batches, add_listing
from atropos_common.net import ports
from atropos_common.net.connections import ConnectionLimits
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.system.run_dir import ENV_ALLOWED_HOSTS, ENV_TOKEN

NOT_STARTED = 3  # uvicorn's own exit status for a server that could not start
ENVIRONMENT = f"""\
environment:
  {ENV_UIDS}=1001,1002        further users of this machine who may call;
                                 `any`: everyone, also from other machines
  {ENV_MAX_BODY}=400    largest body in MiB, as sent and unpacked
  {ENV_ALLOWED_HOSTS}=A,B      further names accepted in the Host header
  {ENV_TOKEN}=SECRET           admits /reset_data, in the header {TOKEN_HEADER}
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m atropos_api",
        description=__doc__,
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to bind (default: %(default)s)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM.

    Returns:
        0 stopped; 1 port in use; 2 wrong flags, environment or installation.
    """
    asked = build_parser().parse_args(argv)
    try:
        settings = Settings.from_env(os.environ, asked.host)
        from atroposlib.api import app  # here, so that `--help` and wrong flags answer at once
    except (ValueError, ImportError) as error:
        print(f"atropos_api: {error}", file=sys.stderr)
        return 2
    add_listing(app)
    try:
        listener = ports.bind(asked.host, asked.port, held=ports.is_held(asked.port, os.environ))
        ports.listen(listener)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        where = f"{asked.host}:{asked.port}"
        fix = "choose another --port"
        print(f"atropos_api: {where} cannot be bound ({why}); {fix}", file=sys.stderr)
        return 1
    print(f"run-api serves on http://{asked.host}:{asked.port}", flush=True)
    # No proxy headers: the middleware needs the caller's true address. No route is a WebSocket.
    served = AuthMiddleware(Batches(app, app.state), settings)
    # With `any` no user is excluded, so no connection has to be limited.
    counted = ConnectionLimits(settings.uids).protocol() if settings.uids is not None else "auto"
    server = uvicorn.Server(uvicorn.Config(served, http=counted, proxy_headers=False, ws="none"))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0 if server.started else NOT_STARTED


if __name__ == "__main__":
    sys.exit(main())
