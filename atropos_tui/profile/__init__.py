"""Data model of a run: profiles, checks, budgets, plans and specs. Starts no process."""
