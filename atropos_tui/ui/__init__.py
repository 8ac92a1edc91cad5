"""The Textual screen of one run."""
