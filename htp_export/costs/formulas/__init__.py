"""Formulas for the work of operators: each file here has a table ``FORMULAS``, ``(domain, operator)`` → formula."""
