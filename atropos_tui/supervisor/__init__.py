"""What runs: one event loop that owns every process of a run. Knows specs and roles; no profile, no Textual."""
