"""The pipeline at work: the runtime that executes a schedule's programs, and what it measures."""
