"""A JSON server on the loopback, the base of stand-ins for the inference server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from atropos_common.protocol.bridge import TOKEN_HEADER

Answer = Callable[[str, dict[str, Any], str | None], tuple[int, Any] | None]
"""Path, body and token of a request -> status and body; None hangs up, as a killed process does."""


class JsonServer(ThreadingHTTPServer):
    """Answers until it is closed; an exception of `answer` hangs up as well."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: a client that hung up."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        answer = self.server.answer(self.path, body, self.headers.get(TOKEN_HEADER))
        if answer is None:
            self.close_connection = True
            return
        payload = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        pass
