"""Arithmetic on model shapes: parameters, FLOPs, bytes; and supported engine releases."""
