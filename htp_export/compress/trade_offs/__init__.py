"""Which precisions are worth it: the error of each module measured, and the plans with the best trade-offs."""
