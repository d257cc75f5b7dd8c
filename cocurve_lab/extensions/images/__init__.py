"""Rows that carry images, for the language tower of a vision-language model."""
