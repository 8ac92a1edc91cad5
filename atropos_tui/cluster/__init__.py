"""Other machines: SLURM, ssh, Ray, the node agent, placement and its checks."""
