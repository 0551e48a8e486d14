"""Models in GGUF, the file format of llama.cpp: written and read."""
