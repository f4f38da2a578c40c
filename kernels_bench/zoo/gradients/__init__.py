"""Planted gradient faults and healthy steps, which `gradiometer.check_gradients` examines."""
