"""The cost of a monitor, a recorder and a run record in a training step."""
