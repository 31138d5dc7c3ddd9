"""``python -m kagent_cuda.check``: on a machine with a GPU, whether all is right and how fast it is."""
