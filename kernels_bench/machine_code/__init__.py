"""The machine code of the kernels on each target, and the resulting bound for each GPU."""
