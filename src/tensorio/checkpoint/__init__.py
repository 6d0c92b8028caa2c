"""Checkpoints: one opened file (or several), and what can be done with them."""
