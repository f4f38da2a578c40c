"""Planted faults and healthy models, which `gradiometer.check_model` examines."""
