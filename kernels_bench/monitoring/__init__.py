"""What a monitor, a recorder and a run record add to a training step."""
