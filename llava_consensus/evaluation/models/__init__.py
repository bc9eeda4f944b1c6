"""Models as the evaluation gets them: where their files are, whether their weights are whole, other layouts."""
