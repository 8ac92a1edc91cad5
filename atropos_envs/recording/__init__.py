"""Rollouts of programs that only know an OpenAI-compatible address."""
