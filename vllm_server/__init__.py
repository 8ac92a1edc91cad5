"""vLLM behind a small protocol: `/generate`, `/bridge/*`, and weights that a trainer can map.

python -m vllm_server --model MODEL --port 9001
"""
