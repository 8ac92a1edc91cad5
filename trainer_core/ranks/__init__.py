"""Ranks of a distributed trainer: launch, world, process group, context parallelism."""
