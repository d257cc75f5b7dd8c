"""A pruned model in the forms that other programs read: one GGUF file for llama.cpp.

In reading order:

    gguf.py       `export_gguf`: the file and its keys
    quantizing.py `quantize_gguf`: the file in fewer bits, by llama.cpp's quantizer
    ollama.py     `write_modelfile`: the Modelfile beside the file
    tensors.py    whether llama.cpp can compute the model, and the tensors of the file
    tokenizer.py  the tokenizer in llama.cpp's terms

This room imports only `errors`, `storage` and `models`, and `gguf` where it is used. README.md says
where a pruned model runs.
"""
