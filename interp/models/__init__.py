"""The model: attention mathematics, layers, the hooked transformer, and loading it."""
