"""How stable a plan is, how far from the best, and other ways to H."""
