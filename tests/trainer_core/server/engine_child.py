"""Stand-in for `python -m vllm_server`: it answers `/bridge/info`, and an option gives it one
fault.

    python engine_child.py PORT [--exit CODE] [--deaf] [--stubborn] [--grandchild FILE]

It lives until a signal ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

TOKEN_HEADER = "X-Atropos-Token"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        trusted = self.headers.get(TOKEN_HEADER, "") == os.environ.get("ATROPOS_TOKEN", "")
        info = {
            "instance_id": str(os.getpid()),
            "model": "m",
            "vllm_version": "0",
            "held": os.environ.get("ATROPOS_HOLD_GENERATION") == "1",
        }
        body = json.dumps(info).encode()
        self.send_response(200 if trusted else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main(argv: list[str]) -> int:
    print("this child begins", flush=True)
    if "--exit" in argv:
        print("vllm_server: --model is wrong", flush=True)
        return int(argv[argv.index("--exit") + 1])
    if "--stubborn" in argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--grandchild" in argv:
        other = subprocess.Popen(["sleep", "600"])
        Path(argv[argv.index("--grandchild") + 1]).write_text(str(other.pid))
    HTTPServer.allow_reuse_port = os.environ.get("ATROPOS_HELD_PORT") == argv[0]
    HTTPServer(("127.0.0.1", int(argv[0])), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
