"""How new weights come to answer: loaders, single copy, loads from a folder, broadcasts, and the check of the graphs.

Importing this package imports neither vLLM nor torch.
"""
