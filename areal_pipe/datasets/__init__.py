"""Prompts: rows with `messages`, from files, URLs or the Hugging Face hub."""
