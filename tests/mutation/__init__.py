"""Mutation testing: measures how many small edits of the package the tests notice. See run.py."""
