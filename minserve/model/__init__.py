"""The model that is served: configuration, checkpoint, tokenizer, layers, training and the weights that ship."""
