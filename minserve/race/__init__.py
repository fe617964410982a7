"""`minserve race`: the same eight prompts in a generate() loop and in the engine, replayed side by side."""
