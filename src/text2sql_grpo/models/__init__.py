"""Models as transformers folders: by name, from GGUF files, and on a CPU."""
