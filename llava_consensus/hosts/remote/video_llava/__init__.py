"""Video-LLaVA by its authors' own package, `videollava`: LLaVA 1.1 with the towers of LanguageBind, one for pictures
and one, with attention over time in each block, for clips.
"""
