"""Products with few tiles and a long K: alternatives to the mm template's split-K that occupy every multiprocessor."""
