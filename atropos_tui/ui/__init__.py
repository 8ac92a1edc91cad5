"""The Textual screen: a client of the supervisor's socket and a reader of the run's files."""
