"""Speculative decoding: cheap guesses at the next tokens, one step that checks them all, and how many are worth it."""
