"""Views of the patches behind an answer: the images of `ask --overlay`, and a web page (`demo`)."""
