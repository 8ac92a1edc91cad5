"""Audit of an engine: does it serve the weights of this folder?

    python -m trainer_core.audit --engine http://127.0.0.1:8000 --weights DIR

It needs torch and transformers, and an OpenAI-compatible server that takes token ids and returns
logprobs. Neither a profile nor a supervisor takes part.
"""
