"""Communication group between trainer and engines for the broadcast of weights (needs torch)."""
