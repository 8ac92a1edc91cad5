"""How new weights reach the engine: load formats, loads from a folder, broadcasts, single copy."""
