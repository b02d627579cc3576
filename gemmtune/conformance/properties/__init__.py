"""Properties: assertions with their checks and cases, one module for each subject. ``table`` lists them all."""
