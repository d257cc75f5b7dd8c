"""Models larger than memory, and builds on several machines."""
