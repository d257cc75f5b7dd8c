"""A pretrained language model under a short name, fetched by one command."""
