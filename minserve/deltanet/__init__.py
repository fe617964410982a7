"""Gated DeltaNet: the memory that has a fixed size and cannot be cut into pages."""
