"""Statedrift finds where a cached recurrent state drifts from the truth."""
