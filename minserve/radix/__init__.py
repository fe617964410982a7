"""The prefix cache as a radix tree: which pages hold which tokens, and attention that reads a common prefix once."""
