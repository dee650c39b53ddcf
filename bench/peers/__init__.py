"""What `compare.py` is made of: workloads, contestants, their processes, and the tables."""
