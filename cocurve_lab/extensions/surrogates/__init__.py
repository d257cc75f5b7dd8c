"""Matrices beside H, made from the shifts of the logits."""
