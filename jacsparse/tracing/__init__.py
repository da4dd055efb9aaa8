"""A call becomes a program: a graph of ATen operations."""
