"""A health server on port argv[1]: 503 for argv[2] seconds, then 200; after argv[3] further seconds
it hangs."""

import http.server
import sys
import time

began = time.monotonic()
ready_after, hang_after = float(sys.argv[2]), float(sys.argv[3])


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        age = time.monotonic() - began
        if age > ready_after + hang_after:
            time.sleep(600)
        self.send_response(200 if age > ready_after else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
