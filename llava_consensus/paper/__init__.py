"""Code that only reproduces the paper: its study, ablations, figures, claims and published results."""
