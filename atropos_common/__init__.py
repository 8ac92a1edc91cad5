"""Code that the programs share. Imports nothing else of the project."""
