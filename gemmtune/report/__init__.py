"""Reading of stores and results for people: what is known of each problem, differences of two files, and pages about them."""
