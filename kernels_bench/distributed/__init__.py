"""Reductions over ranks: measured with Gloo, simulated, and computed from a cost model."""
