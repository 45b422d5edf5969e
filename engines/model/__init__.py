"""Transformers that the torch engine runs. `config` needs no torch; `load` makes a model."""
