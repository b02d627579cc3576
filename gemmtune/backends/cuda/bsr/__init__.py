"""Block-sparse weights that are prepacked: units of 64 by 64, of which only those that exist are copied and multiplied."""
