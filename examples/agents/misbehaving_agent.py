"""Does what its task names, and else behaves. Standard library alone."""

import json
import os
import socket
import sys
import time
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit


def ask(model, question):
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def hold_connections():
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    held = []
    for _ in range(500):
        with suppress(OSError):
            held.append(socket.create_connection((place.hostname, place.port)))
    time.sleep(1)


task = json.load(sys.stdin)
does = task.get("does", "")
if does == "never asks":
    sys.exit(0)
model = "some-other-model" if does == "asks for another model" else os.environ["OPENAI_MODEL"]
text = ask(model, task["question"])
if does == "holds connections":
    hold_connections()
if does == "crashes midway":
    raise RuntimeError("the agent's own mistake")
if does == "runs out of time":
    time.sleep(3600)
print(text)
