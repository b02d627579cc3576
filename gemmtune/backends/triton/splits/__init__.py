"""Products with few tiles and a long K: an alternative to the mm template's split-K that occupies every multiprocessor."""
