"""Builders of component specs, one module for each role."""
