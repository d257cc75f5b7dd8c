"""Edges measured between larger parts of a model: blocks, layers, or given groups of units."""
