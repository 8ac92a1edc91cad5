"""Sentences about a run: its verdict, causes and limits."""
