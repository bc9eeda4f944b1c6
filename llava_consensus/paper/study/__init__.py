"""The controlled study of the paper's section 3: what vision and language each find salient, and what either misses."""
