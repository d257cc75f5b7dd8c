"""Pruning methods, one file each, behind one interface (see base.py)."""
