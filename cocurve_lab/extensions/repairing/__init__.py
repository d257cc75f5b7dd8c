"""Refitting and training what a plan leaves."""
