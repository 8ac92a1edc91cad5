"""An inference engine behind a small protocol: vLLM with `/generate`, `/bridge/*` and weights a
trainer can map.

    python -m vllm_server --model MODEL --port 9001

Importing this package imports neither vLLM nor torch.
"""
