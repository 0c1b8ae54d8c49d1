"""hvps: one trainer of Keras 3 models for many processes, by allreduce or parameter servers."""

__version__ = "0.1.0"
