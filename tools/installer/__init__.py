"""What `make install` does, with the standard library alone: nothing is installed yet."""
