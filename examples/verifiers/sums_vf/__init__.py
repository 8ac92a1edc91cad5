"""Sums of two numbers, one turn each."""

from sums_vf.taskset import SumsTaskset

__all__ = ["SumsTaskset"]
