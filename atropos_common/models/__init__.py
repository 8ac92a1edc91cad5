"""Arithmetic on model shapes, and supported models."""
