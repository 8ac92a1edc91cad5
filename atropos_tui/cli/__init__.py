"""The command line: a client of a run's socket and a reader of its files.

Heavy imports wait until a command needs them.
"""
