"""The command line: a client of a run's socket and a reader of its files.

Commands import heavy modules only when they need them, so that `--help` stays fast.
"""
