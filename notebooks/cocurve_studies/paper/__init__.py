"""The tables of the paper, measured again: `cocurve paper`."""
