"""How new weights reach the engine: loaders, single copy, loads from a folder, broadcasts, and the
graph check.

Importing this package imports neither vLLM nor torch.
"""
