"""An agent of smolagents (PyPI) that may call a tool."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    return left + right


task = json.load(sys.stdin)
model = OpenAIServerModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=64,
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
print(agent.run(task["question"]))
