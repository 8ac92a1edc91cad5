"""Sums with a calculator, which counts its calls in the rollout's state."""

from calc_vf.taskset import CalcTaskset

__all__ = ["CalcTaskset"]
