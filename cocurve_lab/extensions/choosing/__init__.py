"""Choosing settings and plans by their measured KL."""
