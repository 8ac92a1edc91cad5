"""atropos-tui: a terminal cockpit for the four-process Atropos RL stack."""

__version__ = "0.1.0"
