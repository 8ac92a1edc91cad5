"""An action of typed fields: the model answers with a JSON object."""

from uuid import uuid4

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Pick(Action):
    x: int


class Board(Observation):
    total: int
    left: int


class PickDigit(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._total = 0

    def reset(self, seed=None, episode_id=None, **_):
        self._total = 0
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Board(total=0, left=2)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        self._total += action.x
        left = 2 - self._state.step_count
        return Board(total=self._total, left=left, done=left == 0, reward=min(action.x, 9) / 9)

    @property
    def state(self):
        return self._state


app = create_app(PickDigit, Pick, Board, env_name="pick_digit", max_concurrent_envs=8)
