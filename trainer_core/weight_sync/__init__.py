"""How trained weights reach the inference server: one strategy per mode behind `base.WeightSync`."""
