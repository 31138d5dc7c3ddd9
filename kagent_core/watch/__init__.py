"""Noticing that host memory was written, however that happened."""
