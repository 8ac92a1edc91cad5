"""A tiny Qwen3 with a chat template that calls the calculator in one of four answers.

    python examples/tool_use/tiny_model.py FOLDER

It is for machines without a GPU. Any model whose chat template knows tools takes its place.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.support import chat_model  # noqa: E402

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "N*N"}}\n</tool_call>'

if __name__ == "__main__":
    chat_model.FORMS = (CALL, "The answer is N.", "Answer: N", "I do not know.")
    chat_model.WORDS = ["hm"]
    print(chat_model.make_chat_model(Path(sys.argv[1]), ROOT / "docs"))
