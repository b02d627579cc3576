"""Products with few tiles and a long sum: other ways than that of the mm template to give every multiprocessor work."""
