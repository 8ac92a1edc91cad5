"""Ranks of a distributed trainer: launch, identity, process group, world, context parallelism."""
