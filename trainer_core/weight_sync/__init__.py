"""Publishing weights to the inference server: one strategy per mode behind `base.WeightSync`."""
