"""Whole-graph decisions in inference: what is computed once, what changes its form, and how tensors are laid out."""
