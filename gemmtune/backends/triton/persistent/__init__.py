"""Large products: programs that work off tile after tile, with blocks that the copy engine moves (TMA, sm90 and newer)."""
