"""Benchmarks: one file for each table or figure of the papers, and for each comparison with peers.

python -m benchmarks list
python -m benchmarks run [NAME...] [--device cpu|cuda] [--threads N] [--out DIR]
python -m benchmarks report DIR
"""
