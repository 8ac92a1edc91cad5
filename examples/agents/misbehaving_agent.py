"""Does what its task names, and else behaves."""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit

import openai

task = json.load(sys.stdin)
does = task.get("does", "")
if does == "never asks":
    sys.exit(0)
if does == "holds connections":
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    held = []
    for _ in range(500):
        with suppress(OSError):
            held.append(socket.create_connection((place.hostname, place.port)))
    # The first ones are idle too: give them back, so that the client below gets in.
    for each in held[:16]:
        each.close()
client = openai.OpenAI(max_retries=5)
model = "some-other-model" if does == "asks for another model" else os.environ["OPENAI_MODEL"]
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": task["question"]}], max_tokens=32
)
if does == "crashes midway":
    raise RuntimeError("the agent's own mistake")
if does == "runs out of time":
    time.sleep(3600)
print(answer.choices[0].message.content)
