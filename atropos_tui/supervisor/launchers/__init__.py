"""Start of processes here (`launcher.py`); other machines are in `atropos_tui/cluster`."""
