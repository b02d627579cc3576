"""The properties: one module for each subject, with what is asserted, by which check, on which cases; ``table`` lists them."""
