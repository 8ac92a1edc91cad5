"""A number is to be guessed; the environment says whether it is higher or lower."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.number))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        # Without a prompt: the environment opens the conversation.
        return [GuessTask(GuessData(number=number % 10)) for number in range(40)]


class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    guesses: int = 4


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            message = "Guess a number from 0 to 9."
            for _ in range(self.config.guesses):
                answer = await interaction.turn(message)
                guess = answer.last_reply.strip()
                if answer.terminated or guess == str(task.data.number):
                    break
                known = guess.isdigit() and int(guess) < task.data.number
                message = "Higher." if known else "Lower."
