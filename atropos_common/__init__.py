"""Code that the programs share: records, messages, run directory, HTTP, files. Imports nothing
else of the project."""
