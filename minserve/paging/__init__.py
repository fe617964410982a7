"""The KV cache in pages: who owns which, and attention through a page table."""
