"""Long trials: jobs that are killed, stopped and brought back over and over. See `make torture`."""
