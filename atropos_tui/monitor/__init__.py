"""Readers of a run's files, and everything computed from them: state, verdict, charts, reports. No
Textual."""
