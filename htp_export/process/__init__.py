"""What concerns the whole process: changes that are put back, garbage collection, progress."""
