"""One GGUF file: export of a pruned model for llama.cpp, and a model as input.

In reading order:

    gguf.py       `export_gguf`: the file and its keys
    tensors.py    whether llama.cpp can compute the model, and the tensors of the file
    tokenizer.py  the tokenizer in llama.cpp's terms
    reading.py    a file as input, read by transformers

The package `gguf` is imported where it is used. README.md says where a pruned model runs.
"""
