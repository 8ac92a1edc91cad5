"""Hosting of an environment: everything around a BaseEnv that is not the environment itself."""
