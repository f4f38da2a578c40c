"""What the kernels compile to on each target, and the bound that follows for each GPU."""
