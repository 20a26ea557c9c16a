"""Packages that add to the trainer, one module for each kind of hook; README.md has their commands."""
