"""Two caches that act as one: pages of keys and values, and slots of recurrent state."""
