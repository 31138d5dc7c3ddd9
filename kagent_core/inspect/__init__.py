"""What a person can read of kagent's work: logs, dumps, explanations and reports."""
