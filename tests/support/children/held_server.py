"""A small engine: serve HTTP 200 on port argv[1], bound as our servers bind, after argv[2]
seconds."""

import http.server
import os
import sys
import time

from atropos_common.net import ports

port = int(sys.argv[1])
bound = ports.bind("127.0.0.1", port, held=ports.is_held(port, os.environ))
time.sleep(float(sys.argv[2]))
ports.listen(bound)


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health, bind_and_activate=False)
server.socket.close()
server.socket = bound
server.serve_forever()
