"""A pruned model in the forms other programs read."""
