"""Checks of a machine's fitness for a stack; those of other machines are in `cluster/doctor.py`."""
