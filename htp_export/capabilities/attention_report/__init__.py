"""``attention_report``: what attention in steps costs, by module."""
