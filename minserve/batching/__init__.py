"""Batches that never sit still: who runs in a step, and attention over what runs."""
