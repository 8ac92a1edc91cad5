"""A number is guessed in several turns; a guess earns more the closer it is."""

import random
import re
from uuid import uuid4

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TURNS = 3
HIGHEST = 9


class Guess(Action):
    message: str


class Hint(Observation):
    message: str


class GuessNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._number = 0

    def reset(self, seed=None, episode_id=None, **_):
        self._number = random.Random(seed).randint(0, HIGHEST)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Hint(message=f"Guess my number from 0 to {HIGHEST}.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        found = re.search(r"\d+", action.message)
        if not found:
            over = self._state.step_count >= TURNS
            return Hint(message="That has no number.", done=over, reward=0.0)
        guess = int(found[0])
        right = guess == self._number
        words = "Right." if right else "Higher." if guess < self._number else "Lower."
        near = max(0.0, 1 - abs(guess - self._number) / HIGHEST)
        over = right or self._state.step_count >= TURNS
        return Hint(message=words, done=over, reward=near / TURNS)

    @property
    def state(self):
        return self._state


app = create_app(GuessNumber, Guess, Hint, env_name="guess_number", max_concurrent_envs=16)
