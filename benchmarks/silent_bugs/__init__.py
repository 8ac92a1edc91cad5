"""Silent bugs of RL stacks, rebuilt around a real vLLM and tiny models, and what `audit` says."""
