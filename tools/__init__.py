"""Programs for people who work on this project; nothing of it is installed."""
