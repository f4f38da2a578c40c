"""A zoo of small training runs, healthy and with one planted mistake, for the default rules of a monitor."""
