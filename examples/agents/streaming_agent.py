"""Two drafts, then an answer that is streamed; it asks for the model that its author used."""

import json
import sys

import openai

task = json.load(sys.stdin)
client = openai.OpenAI()
question = {"role": "user", "content": task["question"]}
drafts = client.chat.completions.create(
    model="gpt-4o-mini", messages=[question], n=2, max_tokens=32, temperature=0.2
)
longest = max((choice.message.content or "" for choice in drafts.choices), key=len)
messages = [
    question,
    {"role": "assistant", "content": longest},
    {"role": "user", "content": "Now the final answer."},
]
stream = client.chat.completions.create(
    model="gpt-4o-mini", messages=messages, max_tokens=32, stream=True
)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
