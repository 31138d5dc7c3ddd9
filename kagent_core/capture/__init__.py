"""Capture: from torch.compile's graphs to programs of ATen operators."""
