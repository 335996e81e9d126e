"""What `benchmarks/gpu.py` measures, a module for each section: `measure(plan, facts)` gives its figures one by one."""
