"""Messages and records between the programs."""
