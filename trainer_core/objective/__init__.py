"""Objectives and alignment."""
