"""The controlled study of the paper's section 3: tokens that vision and language each find salient, or miss."""
