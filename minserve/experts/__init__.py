"""Mixture of experts: which weights a token needs, and where they are."""
