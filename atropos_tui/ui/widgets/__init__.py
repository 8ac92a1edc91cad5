"""The panels of the screen, a file each."""
