"""``attention_report``: the costs of attention in steps, by module."""
