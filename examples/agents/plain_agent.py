"""Answers a question, then checks the answer in a second turn. Standard library alone."""

import json
import os
import sys
import urllib.request


def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 48}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["question"]}]
messages.append(ask(messages))
messages.append({"role": "user", "content": "Are you sure? Reply with the number."})
print(ask(messages)["content"])
