"""Command-line tools beside `serve`: specs, model inventory, quantisation, kernel benchmarks."""
