"""The engine that runs a model: a scheduled batch becomes tensors, a forward pass, and tokens."""
