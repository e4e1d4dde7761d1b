"""Formulas of operators: each file has a table ``FORMULAS``, ``(domain, operator)`` → formula."""
