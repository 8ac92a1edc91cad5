"""Everything around a BaseEnv that is not the environment itself."""
