"""A run's files, and what is computed from them: state, verdict, charts, reports. No Textual."""
