"""What shall run, as data: profiles, specs, checks and plans. Pure; no process is touched here."""
