"""The paper's studies: each a function that returns a tidy table, and a picture of it."""
