"""Words and marks of the screen and the documents.

python -m atropos_tui.monitor.glossary > docs/concepts/glossary.md
"""

from __future__ import annotations

MARKS = {
    "↻": "Restart of the trainer",
    "▲": "Diagnosis: a detected problem. In the line of views: how many are open",
    "◇": "Evaluation, below a curve",
    "◆ ● ■ ✚": "Splits of an evaluation, each with its own mark",
    "▪": "Checkpoint",
    "▴ ▾": "Value beyond the axis, above or below; `b` shows it",
    "━": "Curve, in the title of a chart, before its name",
    "~10": "The curve is a moving average over 10 points",
    "@56": "The title shows the values of step 56, below the cursor",
    "REWARD": (
        "In the list of runs: mean of the newest 20 steps. The sentence of a run has means of 5, "
        "a comparison names its number of steps"
    ),
    "▁▃█": "Rewards of a group, one bar for each completion",
    "× 331": "A line of a log that came 331 times",
}

# Also the glossary of the documents.
WORDS = {
    "accepted token": "Generated token that entered an update of the weights with a gradient",
    "adapter": "LoRA matrices that train in place of the model's weights",
    "advantage": "Score of a rollout relative to its group; the weight of its gradient",
    "alarm, warning, advice": (
        "Severities of a diagnosis: training is wrong or stands still; something is "
        "broken; something could be better"
    ),
    "alignment": (
        "Agreement of engine and trainer at the same weights. The verdict is `ok`, "
        "`drift` or `mismatch`"
    ),
    "attempt": "One life of one component. A restart begins the next",
    "batch": "The sequences of one optimizer step",
    "component": "A supervised process of a run",
    "curriculum": "Choice of problems by their pass rate",
    "diagnosis": "A detected problem, with evidence and fix. Each has a stable rule name",
    "|diff|": "Mean difference of the logprobs of engine and trainer, without its sign",
    "engine": "A vLLM server: its API server, engine core and workers",
    "environment": "The program that draws problems and scores completions",
    "err": "Errors in the log of this attempt",
    "flat group": "Group in which all scores are equal, so nothing to learn",
    "group": "Completions of one prompt",
    "health": "In the table of components: time of the newest health check",
    "health check": (
        "Periodic test of a component. `startup`, `readiness` and `liveness` are its three uses"
    ),
    "hold": "State of an engine that answers nobody until the trainer has named its weights",
    "journal": "Table of a run's processes, for recovery after a crash of the supervisor",
    "key": "Secret of a run. Programs on other machines need it for run-api and generation",
    "knee": "Number of sequences from which more hardly raise the engine's tokens per second",
    "lag": "See policy lag",
    "launcher": "How a process starts: local, SLURM, ssh, Ray, Kubernetes",
    "left out": "Rollouts or groups that did not train, counted by reason",
    "logprob probe": "Comparison of engine and trainer on the same tokens at the same weights",
    "manifest": "File that describes the engine's tensors, for single copy",
    "mode": (
        "How weights reach the engine: `shared_vllm`, `broadcast`, `lora_only`, "
        "`lora_restart`, `none`"
    ),
    "node, node agent": (
        "A machine of the profile; our process there, which starts and ends components"
    ),
    "policy lag": "Trainer's weight version minus the version that made a token",
    "profile": "TOML file that describes a stack",
    "publish": "Move the trainer's weights to the engines",
    "queue slot": "Room at run-api for one group of an environment",
    "rank, world": "One process of a distributed trainer; all of them",
    "ratio": "Probability of a token now, over that at the base (rollout or proximal)",
    "recording": "A copied run directory",
    "replica": "One of several engines with the same weights",
    "role": "Kind of a component: api, env, engine, trainer, prepare, other",
    "rollout": "One completion with its score",
    "rst": "Restarts of a component after a crash",
    "run, run directory": (
        "One execution of a profile; the folder with its records, logs and checkpoints"
    ),
    "single copy": "Trainer and engine use the same tensors in memory",
    "stack": "The processes of one profile",
    "stage": "Named point of a component's start-up",
    "step": "One batch trained and published",
    "supervisor": "Process that starts, checks, restarts and stops the components of a run",
    "token": "A language-model token. In security texts: a secret of the run for control routes",
    "up": "In the table of components: age of the process",
    "useful groups": "Share of the groups of a step that train: those with different scores",
    "weight version": "Number of a published set of weights",
}


def document() -> str:
    """Return the page of the documents."""
    cells = [(word.replace("|", "\\|"), words) for word, words in WORDS.items()]
    rows = "".join(f"| {word} | {words} |\n" for word, words in cells)
    return f"# Glossary\n\n| word | meaning |\n|---|---|\n{rows}"


if __name__ == "__main__":
    print(document(), end="")
