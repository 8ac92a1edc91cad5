"""Messages and records that the programs exchange."""
