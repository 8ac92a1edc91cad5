"""Checks of a profile before anything starts."""
