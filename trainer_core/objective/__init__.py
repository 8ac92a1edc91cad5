"""What is minimised and how trainer and inference server compare: pure functions, sums only."""
