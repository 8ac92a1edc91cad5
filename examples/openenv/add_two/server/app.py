"""One question: a sum. The server takes two sessions at a time."""

import random
import re
from uuid import uuid4

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    text: str


class Question(Observation):
    question: str


class AddTwo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._sum = 0

    def reset(self, seed=None, episode_id=None, **_):
        numbers = random.Random(seed).choices(range(3), k=2)
        self._sum = sum(numbers)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Question(question=f"What is {numbers[0]} + {numbers[1]}?")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        found = re.findall(r"\d+", action.text)
        reward = 1.0 if str(self._sum) in found else 0.2 if found else 0.0
        return Question(question="", done=True, reward=reward)

    @property
    def state(self):
        return self._state


app = create_app(AddTwo, Answer, Question, env_name="add_two", max_concurrent_envs=2)
