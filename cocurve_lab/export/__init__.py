"""A pruned model as one file for llama.cpp.

In reading order:

    gguf.py       `export_gguf`
    tensors.py    the tensors of the file, and whether llama.cpp's block computes this model
    tokenizer.py  a tokenizer in llama.cpp's terms

Imports `models/`. Only this room imports gguf. README.md tells where a pruned model runs.
"""
