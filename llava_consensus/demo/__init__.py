"""Views of the patches behind an answer: the pictures of `ask --overlay`, and a web page (`demo`)."""
