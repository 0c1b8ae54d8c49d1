"""hvps: one trainer for Keras 3 models on many processes, by ring-allreduce or parameter servers."""

__version__ = "0.1.0"
