"""Commands that start runs or write and check profiles."""
